"""Compiles each public header by itself, with every warning an error.

usage: headers_alone.py INCLUDE_DIR [--jobs N] [--together] -- COMPILER [FLAG...]
    --together: all of them in one file, for a second compiler's warnings
"""

import argparse
import concurrent.futures
import pathlib
import subprocess
import sys

WARNINGS = ["-std=c++20", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]


def compile_these(names, include, compiler):
    """Returns what the compiler says about a file that only includes them."""
    # A file that includes it, not the header itself: that would bring the
    # warning about #pragma once in a main file.
    result = subprocess.run(
        [*compiler, *WARNINGS, "-I", include, "-fsyntax-only", "-x", "c++", "-"],
        input="".join(f'#include "{name}"\n' for name in names),
        text=True, capture_output=True)
    return names, result.returncode, result.stderr


def main():
    split = sys.argv.index("--")
    parser = argparse.ArgumentParser()
    parser.add_argument("include", type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--together", action="store_true")
    args = parser.parse_args(sys.argv[1:split])
    compiler = sys.argv[split + 1:]
    headers = [header.relative_to(args.include)
               for header in sorted(args.include.rglob("*.h"))]
    files = [headers] if args.together else [[header] for header in headers]
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for names, status, output in pool.map(
                lambda names: compile_these(names, args.include, compiler), files):
            for name in names:
                print(f"{'ok  ' if status == 0 else 'FAIL'} {name}")
            if status:
                failed += 1
                print(output)
    print(f"{len(headers)} headers, {failed} failed")
    return 1 if failed or not headers else 0


if __name__ == "__main__":
    sys.exit(main())
