"""What lies below a workspace: trees of files, unpacked once into a cache that processes share.

An image is unpacked by a process that is locked into the new tree, so that no name or link in it leads outside. Its files
belong to the workspaces' user; device nodes and the bits of setuid are dropped.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rl4llm.core.errors import ConfigError
from rl4llm.extensions.workspaces.namespaces import workspace_user

HOST_DIRECTORIES = ("usr", "etc", "proc", "dev", "root", "tmp", "var/tmp", "run", "home", "opt", "srv", "mnt")
HOST_LINKS = ("bin", "sbin", "lib", "lib32", "lib64")
HOST_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost workspace\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
HOST_SHOWN = (
    "/usr",
    "/etc/alternatives",
    "/etc/ssl/certs",
    "/etc/ca-certificates",
    "/etc/pki",
    "/etc/ld.so.cache",
)


@dataclass(frozen=True, slots=True)
class Image:
    """A read-only tree, what of the host is shown in it (source, place), and how programs begin."""

    root: Path
    binds: tuple[tuple[str, str], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/root"


def kind_of(name: str) -> str:
    """Return what an image is: "host" or "directory". Raises ConfigError."""
    if name == "host":
        return "host"
    if Path(name).is_dir():
        return "directory"
    raise ConfigError(f"workspace.image={name!r} is neither 'host' nor a directory.")


def prepare(name: str) -> Image:
    """Return an image that is in the cache. Raises ConfigError for one that cannot be used, and OSError."""
    if kind_of(name) == "host":
        return host()
    path = Path(name).resolve()

    def fill(root: Path) -> None:
        shutil.copytree(path, root, symlinks=True, dirs_exist_ok=True)

    return Image(cached(_digest_of(path), fill), cwd="/")


def host() -> Image:
    """Return the image that shows the machine's own /usr in an otherwise empty root."""
    links = [(name, os.readlink(f"/{name}")) for name in HOST_LINKS if os.path.islink(f"/{name}")]
    shown = [path for path in HOST_SHOWN if os.path.exists(path)]
    shown += [
        f"/{name}" for name in HOST_LINKS if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}")
    ]
    content = repr((HOST_DIRECTORIES, HOST_FILES, links, shown))

    def fill(root: Path) -> None:
        for name in HOST_DIRECTORIES:
            (root / name).mkdir(parents=True, exist_ok=True)
        for name, text in HOST_FILES.items():
            (root / name).write_text(text)
        for name, target in links:
            (root / name).symlink_to(target)
        for name in shown:  # where it is mounted
            place = root / name[1:]
            place.parent.mkdir(parents=True, exist_ok=True)
            place.mkdir(exist_ok=True) if os.path.isdir(name) else place.touch()
        for name in ("tmp", "var/tmp"):
            (root / name).chmod(0o1777)

    root = cached(hashlib.sha256(content.encode()).hexdigest(), fill)
    return Image(root, tuple((path, path) for path in shown))


def cached(digest: str, fill: Callable[[Path], None]) -> Path:
    """Return the tree of a digest in the cache, filled by `fill` if it is missing; other processes see it whole or not."""
    cache = Path(os.environ.get("RL4LLM_CACHE") or "~/.cache/rl4llm").expanduser() / "images"
    user = workspace_user()
    root = cache / f"{digest}-{user}"
    if not root.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        partial = cache / f".{secrets.token_hex(8)}"
        partial.mkdir(mode=0o755)
        try:
            fill(partial)
            if os.getuid() == 0:
                for directory, names, files in os.walk(partial):
                    for path in (directory, *(f"{directory}/{name}" for name in (*names, *files))):
                        os.lchown(path, user, user)
            partial.rename(root)
        except OSError:
            if not root.is_dir():  # otherwise another process was faster
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return root


def _digest_of(directory: Path) -> str:
    """Return a digest of a directory by names, sizes, modes and times."""
    digest = hashlib.sha256(str(directory).encode())
    for folder, names, files in os.walk(directory):
        names.sort()
        for name in sorted((*names, *files)):
            path = os.path.join(folder, name)
            state = os.lstat(path)
            link = os.readlink(path) if os.path.islink(path) else ""
            digest.update(repr((path, state.st_mode, state.st_size, state.st_mtime_ns, link)).encode())
    return digest.hexdigest()
