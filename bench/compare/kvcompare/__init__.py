"""What bench/compare/compare is made of; the standard library alone."""
