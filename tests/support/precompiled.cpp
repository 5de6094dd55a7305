// tests/support/precompiled.cpp - where precompiled.h is compiled.
