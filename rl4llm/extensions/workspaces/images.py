"""What lies below a workspace: trees of files, unpacked once into a cache that processes share.

Their files belong to the workspaces' user; device nodes and the bits of setuid are dropped.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rl4llm.core.errors import ConfigError
from rl4llm.extensions.workspaces.keeper import program, remove
from rl4llm.extensions.workspaces.namespaces import workspace_user
from rl4llm.extensions.workspaces.tree import MERGED

HOST_DIRECTORIES = ("usr", "etc", "proc", "dev", "root", "tmp", "var/tmp", "run", "home", "opt", "srv", "mnt")
HOST_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")  # into /usr, on most machines
HOST_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost workspace\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
HOST_SHOWN = (
    "/usr", "/etc/alternatives", "/etc/ssl/certs", "/etc/ca-certificates", "/etc/pki", "/etc/ld.so.cache",
)  # fmt: skip
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8",
    "TERM": "dumb",
}  # fmt: skip
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}  # as Linux and as OCI name them


@dataclass(frozen=True, slots=True)
class Image:
    """A read-only tree, what of the host is visible in it (source, place), and how programs begin."""

    root: Path
    binds: tuple[tuple[str, str], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/"


def locate(name: str) -> Path:
    """Return the path of an image, which for "host" is /usr. Raises ConfigError if there is none."""
    path = Path("/usr" if name == "host" else name).expanduser().resolve()
    if not path.exists():
        accepted = "'host', a directory, a tar, an OCI layout; others with workspace.engine=podman"
        raise ConfigError(f"workspace.image={name!r} was not found. Accepted: {accepted}.")
    return path


def prepare(name: str) -> Image:
    """Return the image of any form. Raises ConfigError for one that cannot be used, and OSError."""
    path = locate(name)
    if name == "host":
        return host()
    if path.is_file():
        with open(path, "rb") as archive:
            digest = hashlib.file_digest(archive, "sha256").hexdigest()
            archive.seek(0)
            return Image(unpacked(name, digest, [archive]))
    if (path / "oci-layout").is_file():
        return _of_layout(name, path)
    digest = tree_digest(path)
    if (root := lookup(digest)) is None:
        with tempfile.TemporaryFile() as archive:
            _run(name, ["tar", "-C", str(path), "--one-file-system", "-cf", "-", "."], stdout=archive)
            archive.seek(0)
            root = unpacked(name, digest, [archive])
    return Image(root)


def host() -> Image:
    """Return the image that shows the machine's own /usr in an otherwise empty root.

    What loads its programs cannot be changed: /etc, and the directories that are links into /usr.
    """
    visible = [path for path in (*HOST_SHOWN, *HOST_LINKS) if os.path.exists(path)]
    content = repr((HOST_DIRECTORIES, HOST_FILES, visible))
    root = _cached(hashlib.sha256(content.encode()).hexdigest(), lambda root: _fill_host(root, visible))
    etc = (f"{MERGED}/etc", "/etc")  # the workspace's, read-only
    return Image(root, (etc, *((os.path.realpath(path), path) for path in visible)), cwd="/root")


def unpacked(
    name: str, digest: str, archives: Iterable[IO[bytes]], *, shell: bool = True, layers: bool = False
) -> Path:
    """Return the tree of archives, each over the last; `layers` also remove. Raises ConfigError without a `shell` in it."""

    def fill(root: Path) -> None:
        for archive in archives:
            _run(name, program("unpack", str(root), *["layer"] * layers), stdin=archive)
        if shell and not os.path.lexists(root / "bin/sh"):
            raise ConfigError(
                f"workspace.image={name!r} has no /bin/sh: it is not the root of a file system."
            )

    return _cached(digest, fill)


def lookup(digest: str) -> Path | None:
    """Return the tree of a digest, if the cache has it."""
    root = _place(digest)
    return root if root.is_dir() else None


def own(tree: Path) -> None:
    """Give a tree of files to the user of workspaces."""
    if os.getuid() == 0:
        user = workspace_user()
        subprocess.run(["chown", "-hR", f"{user}:{user}", tree], check=True, capture_output=True)


def tree_digest(directory: Path) -> str:
    """Return a digest of a directory by the names, modes, links and contents in it."""
    digest = hashlib.sha256()
    for folder, names, files in os.walk(directory):
        names.sort()
        for name in sorted((*names, *files)):
            path = Path(folder, name)
            mode = path.lstat().st_mode
            content: str | bytes = os.readlink(path) if stat.S_ISLNK(mode) else b""
            if stat.S_ISREG(mode):
                with open(path, "rb") as file:
                    content = hashlib.file_digest(file, "sha256").digest()
            digest.update(repr((str(path.relative_to(directory)), mode, content)).encode())
    return digest.hexdigest()


def _of_layout(name: str, path: Path) -> Image:
    """Return the image of an OCI layout for this machine, as image-spec 1.1 describes it."""
    index, digest = json.loads((path / "index.json").read_text()), ""
    target = {"os": "linux", "architecture": MACHINES.get(platform.machine(), platform.machine())}
    while "manifests" in index:
        rows = [row for row in index["manifests"] if target.items() <= row.get("platform", target).items()]
        if (count := len({row["digest"] for row in rows})) != 1:
            raise ConfigError(f"workspace.image={name!r} has {count} images for {target}, not one.")
        index, digest = _json(name, path, rows[0]), rows[0]["digest"]
    config = _json(name, path, index["config"]).get("config") or {}
    variables = dict(entry.split("=", 1) for entry in config.get("Env") or ())
    layers = (file for layer in index["layers"] for file in _blob(name, path, layer))
    root = unpacked(name, digest.removeprefix("sha256:"), layers, layers=True)
    return Image(root, environment=variables, cwd=config.get("WorkingDir") or "/")


def _json(name: str, path: Path, descriptor: Mapping[str, Any]) -> dict[str, Any]:
    return dict(*map(json.load, _blob(name, path, descriptor)))


def _blob(name: str, path: Path, descriptor: Mapping[str, Any]) -> Iterator[IO[bytes]]:
    """Open a blob of a layout while it is used. Raises ConfigError if its content has another digest."""
    digest = descriptor["digest"].removeprefix("sha256:")
    with open(path / "blobs" / "sha256" / digest, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            raise ConfigError(
                f"workspace.image={name!r}: the blob {digest} is damaged. Save the image again."
            )
        file.seek(0)
        yield file


def _fill_host(root: Path, visible: Sequence[str]) -> None:
    for name in (*HOST_DIRECTORIES, *(path[1:] for path in visible if os.path.isdir(path))):
        (root / name).mkdir(parents=True, exist_ok=True)
    for path in visible:
        if not os.path.isdir(path):
            (root / path[1:]).touch()
    for name, text in HOST_FILES.items():
        (root / name).write_text(text)
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    own(root)


def _run(
    name: str, words: Sequence[str], stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None
) -> None:
    done = subprocess.run(words, stdin=stdin, stdout=stdout, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip()[-300:]
        raise ConfigError(f"workspace.image={name!r} cannot be unpacked: {reason}")


def _place(digest: str) -> Path:
    cache = Path(os.environ.get("RL4LLM_CACHE") or "~/.cache/rl4llm").expanduser()
    return cache / "images" / f"{digest}-{workspace_user()}"


def _cached(digest: str, fill: Callable[[Path], None]) -> Path:
    """Return the tree of a digest in the cache, filled by `fill` if it is missing; other processes see it whole or not."""
    root = _place(digest)
    if not root.is_dir():
        root.parent.mkdir(parents=True, exist_ok=True)
        partial = root.parent / f".{secrets.token_hex(8)}"
        partial.mkdir(mode=0o755)
        own(partial)
        try:
            fill(partial)
            partial.rename(root)
        except OSError:
            if not root.is_dir():  # otherwise another process was faster
                raise
        finally:
            remove(str(partial))
    return root
