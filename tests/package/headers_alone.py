"""Compiles each public header by itself, with every warning an error.

usage: headers_alone.py INCLUDE_DIR [--jobs N] -- COMPILER [FLAG...]
"""

import argparse
import concurrent.futures
import pathlib
import subprocess
import sys

WARNINGS = ["-std=c++20", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]


def compile_alone(header, include, compiler):
    """Returns what the compiler says about a file that only includes it."""
    name = header.relative_to(include)
    # A file that includes it, not the header itself: that would bring the
    # warning about #pragma once in a main file.
    result = subprocess.run(
        [*compiler, *WARNINGS, "-I", include, "-fsyntax-only", "-x", "c++", "-"],
        input=f'#include "{name}"\n', text=True, capture_output=True)
    return name, result.returncode, result.stderr


def main():
    split = sys.argv.index("--")
    parser = argparse.ArgumentParser()
    parser.add_argument("include", type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args(sys.argv[1:split])
    compiler = sys.argv[split + 1:]
    headers = sorted(args.include.rglob("*.h"))
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for name, status, output in pool.map(
                lambda header: compile_alone(header, args.include, compiler), headers):
            print(f"{'ok  ' if status == 0 else 'FAIL'} {name}")
            if status:
                failed += 1
                print(output)
    print(f"{len(headers)} headers, {failed} failed")
    return 1 if failed or not headers else 0


if __name__ == "__main__":
    sys.exit(main())
