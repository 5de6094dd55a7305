"""The peers' Python environments, made once in the cache folder."""

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
PROJECT = HERE.parents[1]


def cache_folder() -> Path:
    """The one that scripts/bootstrap fills."""
    if own := os.environ.get("KVCACHE_CACHE_DIR"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvcache"


def environment_folder(requirements: Path) -> Path:
    """Named by what is in it: another list makes another environment."""
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return cache_folder() / f"{requirements.stem}-{version}-{digest}"


def provide(requirements: Path, variables: dict | None = None) -> Path:
    """The Python of the environment that has `requirements`, made if it lacks."""
    folder = environment_folder(requirements)
    if not folder.exists():
        print(f"compare: making {folder} (some GB of packages)", file=sys.stderr)
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        venv.create(part, with_pip=True)
        subprocess.run(
            [part / "bin/python", "-m", "pip", "install", "--quiet", "-r", requirements],
            env=os.environ | (variables or {}),
            check=True,
        )
        part.rename(folder)
    return folder / "bin/python"


def peers_python() -> Path:
    return provide(HERE / "requirements.txt")


def native_python(make: bool) -> Path | None:
    """None if it is not there and is not to be made."""
    requirements = HERE / "requirements-native.txt"
    if not make and not environment_folder(requirements).exists():
        return None
    flags = "-DGGML_NATIVE=ON -DCMAKE_BUILD_TYPE=Release"
    return provide(requirements, {"CMAKE_ARGS": flags})
