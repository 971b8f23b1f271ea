"""What lies below a workspace: trees of files, unpacked once into a cache that processes share.

Their files belong to the workspaces' user; device nodes and the bits of setuid are dropped.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import stat
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rl4llm.core.errors import ConfigError
from rl4llm.extensions.workspaces.keeper import program, remove
from rl4llm.extensions.workspaces.namespaces import workspace_user
from rl4llm.extensions.workspaces.tree import MERGED
from rl4llm.extensions.workspaces.unpack import SHELL

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
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
CONTAINERS = ("podman", "docker")


@dataclass(frozen=True, slots=True)
class Image:
    """A read-only tree, what of the host is shown in it (source, place), and how programs begin."""

    root: Path
    binds: tuple[tuple[str, str], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/"


def kind_of(name: str) -> str:
    """Return what an image is. Raises ConfigError if it cannot be found."""
    path = Path(name).expanduser()
    if name == "host":
        return "host"
    if (path / "index.json").is_file() and (path / "oci-layout").is_file():
        return "oci"
    if path.is_dir():
        return "dockerfile" if (path / "Dockerfile").is_file() else "directory"
    if path.is_file():
        return "archive"
    if not os.path.isabs(name) and not name.startswith((".", "~")) and any(map(shutil.which, CONTAINERS)):
        return "name"
    raise ConfigError(
        f"workspace.image={name!r} was not found. Accepted: 'host', a directory, a tar, an OCI layout."
    )


def prepare(name: str) -> Image:
    """Return an image of any kind but a Dockerfile's. Raises ConfigError for one that cannot be used, and OSError."""
    path = Path(name).expanduser().resolve()
    match kind_of(name):
        case "host":
            return host()
        case "directory":
            pack = ["tar", "-C", str(path), "--one-file-system", "-cf", "-", "."]
            return Image(unpacked(name, tree_digest(path), [pack]))
        case "archive":
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            return Image(unpacked(name, digest, [path]))
        case "oci":
            return _layout(name, path)
    return of_containers(name, [])


def host() -> Image:
    """Return the image that shows the machine's own /usr in an otherwise empty root.

    What loads its programs cannot be changed: /etc, and the directories that are links into /usr.
    """
    shown = [path for path in (*HOST_SHOWN, *HOST_LINKS) if os.path.exists(path)]
    content = repr((HOST_DIRECTORIES, HOST_FILES, shown))

    root = _cached(hashlib.sha256(content.encode()).hexdigest(), lambda root: _fill_host(root, shown))
    etc = (f"{MERGED}/etc", "/etc")  # the workspace's, read-only
    return Image(root, (etc, *((os.path.realpath(path), path) for path in shown)), cwd="/root")


def _fill_host(root: Path, shown: Sequence[str]) -> None:
    for name in (*HOST_DIRECTORIES, *(path[1:] for path in shown if os.path.isdir(path))):
        (root / name).mkdir(parents=True, exist_ok=True)
    for path in shown:
        if not os.path.isdir(path):
            (root / path[1:]).touch()
    for name, text in HOST_FILES.items():
        (root / name).write_text(text)
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    own(root)


def unpacked(
    name: str, digest: str, layers: Sequence[Path | list[str] | IO[bytes]], *, shell: bool = True
) -> Path:
    """Return the tree of archives, one over the other: files, commands that print one, or open files.

    Raises ConfigError if one cannot be read, or if there is no `shell` in the end.
    """

    def fill(root: Path) -> None:
        printed = ""
        for layer in layers:
            printed = _unpack(name, root, layer)
        if shell and printed.strip() != "True":
            raise ConfigError(
                f"workspace.image={name!r} has no /bin/sh, so it is not the root of a file system."
            )

    return _cached(digest, fill)


def _unpack(name: str, root: Path, layer: Path | list[str] | IO[bytes]) -> str:
    """Unpack an archive into a tree; return what the process printed."""
    if isinstance(layer, list):
        with subprocess.Popen(layer, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as source:
            assert source.stdout is not None and source.stderr is not None
            line = _unpack(name, root, source.stdout)
            problem = source.stderr.read().decode(errors="replace")[-300:].strip()
        if source.returncode:
            raise ConfigError(f"workspace.image={name!r}: {problem}")
        return line
    if isinstance(layer, Path):
        if _is_zstd(layer):
            return _unpack(name, root, ["zstd", "-dc", str(layer)])
        with open(layer, "rb") as file:
            return _unpack(name, root, file)
    done = subprocess.run(
        program("unpack", str(root)), stdin=layer, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ConfigError(f"workspace.image={name!r} cannot be unpacked: {done.stderr.strip()[-300:]}")
    return done.stdout


def containers() -> str | None:
    """Return podman or docker, where one works."""
    for command in filter(shutil.which, CONTAINERS):
        if subprocess.run([command, "info"], capture_output=True, check=False).returncode == 0:
            return command
    return None


def of_containers(name: str, build: Sequence[str]) -> Image:
    """Return the image that podman or docker has or pulls by its name, or that its `build` command makes."""
    if (command := containers()) is None:
        raise ConfigError(
            f"workspace.image={name!r} needs podman or docker, and none of them works on this machine."
        )

    def output(*words: str) -> str:
        done = subprocess.run([command, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(f"workspace.image={name!r}: {command}: {done.stderr.strip()[-300:]}")
        return done.stdout.strip()

    container = output("create", output("build", "-q", *build) if build else name, SHELL)
    try:
        [details] = json.loads(
            output("image", "inspect", output("inspect", "--format", "{{.Image}}", container))
        )
        root = unpacked(name, details["Id"].removeprefix("sha256:"), [[command, "export", container]])
    finally:
        output("rm", container)
    return _configured(root, details["Config"])


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


def lookup(digest: str) -> Path | None:
    """Return the tree of a digest, if the cache has it."""
    root = _cache() / f"{digest}-{workspace_user()}"
    return root if root.is_dir() else None


def empty() -> Image:
    """Return the image without any file."""
    return Image(_cached(hashlib.sha256(b"").hexdigest(), lambda root: None))


def _cache() -> Path:
    return Path(os.environ.get("RL4LLM_CACHE") or "~/.cache/rl4llm").expanduser() / "images"


def _cached(digest: str, fill: Callable[[Path], None]) -> Path:
    """Return the tree of a digest in the cache, filled by `fill` if it is missing; other processes see it whole or not."""
    cache = _cache()
    root = cache / f"{digest}-{workspace_user()}"
    if not root.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        partial = cache / f".{secrets.token_hex(8)}"
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


def _layout(name: str, path: Path) -> Image:
    """Return an image of an OCI layout, for this machine's processor."""

    def blob(descriptor: Mapping[str, Any]) -> Path:
        match = DIGEST.fullmatch(str(descriptor["digest"]))
        if match is None:
            raise ConfigError(
                f"workspace.image={name!r}: the digest {descriptor['digest']!r} is not one of SHA-256."
            )
        file = path / "blobs" / "sha256" / match[1]
        with open(file, "rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() != match[1]:
                raise ConfigError(f"workspace.image={name!r}: the blob {match[1]} is damaged.")
        return file

    machine = MACHINES.get(platform.machine(), platform.machine())
    found = json.loads((path / "index.json").read_text())
    digest = ""
    while "manifests" in found:
        choices = [
            entry
            for entry in found["manifests"]
            if entry.get("platform", {}).get("architecture", machine) == machine
        ]
        if not choices:
            raise ConfigError(f"workspace.image={name!r} has no image for {machine}.")
        digest = choices[0]["digest"].removeprefix("sha256:")
        found = json.loads(blob(choices[0]).read_text())
    root = unpacked(name, digest, [blob(layer) for layer in found["layers"]])
    return _configured(root, json.loads(blob(found["config"]).read_text()).get("config") or {})


def _configured(root: Path, config: Mapping[str, Any]) -> Image:
    variables = dict(entry.split("=", 1) for entry in config.get("Env") or () if "=" in entry)
    return Image(root, environment=variables, cwd=config.get("WorkingDir") or "/")


def _is_zstd(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"\x28\xb5\x2f\xfd"
