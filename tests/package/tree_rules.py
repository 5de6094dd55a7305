"""The rules of the tree that a compiler does not see.

usage: tree_rules.py PROJECT_DIR

Who may include whom, how long a file may be, and that no file names a path or a
host of one machine. Prints each breach with its place; exit 1 if there is any.
"""

import pathlib
import re
import subprocess
import sys

CODE = {".h": 250, ".cuh": 250, ".cpp": 400, ".cu": 400}
FORWARD = ("include/kvcache/model/", "src/model/forward/")
# Recorded steps exist over one kind only; no forward includes this.
RECORDED = "include/kvcache/model/graph_model.h"
# Headers of one kind of cache: a model sees the interface only.
CONCRETE = re.compile(r'kvcache/(?!checkpoint_store)\w+_(cache|decoder)\.h"')
HEAVY = re.compile(r"<(torch/(torch|extension|all|types)|ATen/ATen)\.h>")
# Written in pieces, or this file would break the rule itself.
MACHINE = re.compile("|".join(
    "(?<![\\w.<}])" + re.escape(a + b) for a, b in [
        ("/ro", "ot/"), ("/wo", "rk/"), ("/ho", "me/"), ("/tmp/", "bash_jobs"),
    ]) + "|" + "|".join(re.escape(a + b) for a, b in [
        ("py", "pi.org"), ("python", "hosted"), ("deb.", "debian.org"),
    ]))


def tracked_files(root):
    listed = subprocess.run(["git", "-C", root, "ls-files", "-z", "--cached"],
                            capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        names = listed.stdout.split("\0")
    else:  # an archive without its history
        names = [str(p.relative_to(root)) for p in root.rglob("*")
                 if not p.relative_to(root).parts[0].startswith("build")
                 and p.relative_to(root).parts[0] != ".git"]
    return [n for n in names if n and (root / n).is_file()
            and not n.startswith("third_party/")]


def code_lines(text):
    return sum(1 for line in text.splitlines()
               if line.strip() and not line.strip().startswith("//"))


def breaches(root):
    for name in tracked_files(root):
        path = root / name
        if path.stat().st_size > 1 << 20:
            yield f"{name}: {path.stat().st_size} bytes; no file over 1 MiB is kept here"
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        limit = CODE.get(path.suffix)
        if limit and code_lines(text) > limit:
            yield f"{name}: {code_lines(text)} lines of code, at most {limit}; split it"
        for number, line in enumerate(text.splitlines(), 1):
            place = f"{name}:{number}"
            if MACHINE.search(line):
                yield f"{place}: a path or host of one machine: {line.strip()[:100]}"
            if not line.startswith("#include"):
                continue
            if name.startswith("include/") and HEAVY.search(line):
                yield f"{place}: a public header takes narrow ATen headers: {line}"
            if name == RECORDED:
                pass
            elif name.startswith(FORWARD):
                if CONCRETE.search(line):
                    yield f"{place}: the forward sees kvcache/cache.h only: {line}"
            elif name.startswith(("include/kvcache/", "src/")) and \
                    not name.startswith("src/model/"):
                if '"kvcache/model/' in line:
                    yield f"{place}: a cache never sees a model: {line}"
            if name.startswith(("include/", "src/")) and "examples/" in line:
                yield f"{place}: the library never sees an example: {line}"


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    found = list(breaches(root))
    for breach in found:
        print(breach)
    print(f"{len(found)} breaches in {len(tracked_files(root))} files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
