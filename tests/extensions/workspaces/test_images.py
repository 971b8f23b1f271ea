"""What may lie below a workspace, and that no archive writes outside of its tree."""

import asyncio
import copy
import gzip
import hashlib
import io
import json
import os
import platform
import shutil
import stat
import subprocess
import sys
import tarfile

import pytest

from rl4llm.core.errors import ConfigError
from rl4llm.extensions.workspaces import Workspaces


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("RL4LLM_CACHE", str(tmp_path / "cache"))


def sh(command):
    return lambda workspace: workspace.run(["sh", "-c", command], wall_s=60)


@pytest.fixture
def archive(image, tmp_path):
    """Return archive(members): a tar of the small image, with members that were made by hand at its end."""

    def made(members=(), name="image.tar"):
        with tarfile.open(tmp_path / name, "w:gz" if name.endswith("gz") else "w") as tar:
            tar.add(image, ".")
            for member, content in members:
                tar.addfile(member, io.BytesIO(content))
        return str(tmp_path / name)

    return made


def member(name, kind=tarfile.REGTYPE, link="", content=b"", mode=0o644):
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size, made.mode = kind, link, len(content), mode
    return made, content


@pytest.mark.parametrize("form", ["directory", "image.tar", "image.tar.gz"])
def test_a_file_system_of_any_form_can_be_changed(form, play, image, archive):
    before = {path: path.stat().st_mtime_ns for path in image.rglob("*")}
    scenario = sh("cat /data/kept; echo new > /data/kept; rm /bin/ls; mkdir /new; cat /data/kept; id -u")
    result = play(scenario, image=str(image) if form == "directory" else archive(name=form))
    assert result.output == "old\nnew\n0\n"
    assert {path: path.stat().st_mtime_ns for path in image.rglob("*")} == before
    again = play(
        sh("cat /data/kept; ls -d /new /bin/ls"),
        image=str(image) if form == "directory" else archive(name=form),
    )
    assert again.output.startswith("old\n") and again.code != 0


ESCAPES = {
    "a parent": [member("../../{out}/parent", content=b"x")],
    "an absolute path": [member("/{out}/absolute", content=b"x")],
    "through a link": [member("door", tarfile.SYMTYPE, "/{out}"), member("door/through", content=b"x")],
    "through a climbing link": [
        member("up", tarfile.SYMTYPE, "../" * 20 + "{out}"),
        member("up/x", content=b"x"),
    ],
    "over a link": [member("it", tarfile.SYMTYPE, "/{out}/victim"), member("it", content=b"x")],
    "a hard link": [member("hard", tarfile.LNKTYPE, "/{out}/victim")],
    "a hard link that climbs": [member("hard", tarfile.LNKTYPE, "../" * 20 + "{out}/victim")],
    "a whiteout": [member("../../../{out}/.wh.victim")],
    "a mark of a layer through a link": [
        member("door", tarfile.SYMTYPE, "/{out}"),
        member("door/.wh..wh..opq"),
    ],
}


def outside(tmp_path, attack):
    """Return a directory with a victim, and the members of an attack that names it."""
    out = tmp_path / "out"
    out.mkdir(mode=0o777)
    (out / "victim").write_text("mine")
    members = []
    for made, content in attack:
        made = copy.copy(made)
        made.name, made.linkname = (
            text.replace("{out}", str(out)[1:]) for text in (made.name, made.linkname)
        )
        members.append((made, content))
    return out, members


@pytest.mark.parametrize("name", ESCAPES)
def test_an_archive_does_not_write_outside(name, play, archive, tmp_path):
    out, members = outside(tmp_path, ESCAPES[name])
    try:
        result = play(sh("cat /hard /door/victim /it"), image=archive(members))
    except ConfigError:
        assert "link" in name and name != "over a link"  # its target is missing inside
        result = None
    assert [path.name for path in out.iterdir()] == ["victim"] and (out / "victim").read_text() == "mine"
    assert result is None or "mine" not in result.output


def test_devices_and_setuid_are_dropped(play, archive, tmp_path):
    device = tarfile.TarInfo("disk")
    device.type, device.devmajor, device.devminor = tarfile.BLKTYPE, 254, 0
    members = [(device, b""), member("tool", content=b"x", mode=0o6755), member("pipe", tarfile.FIFOTYPE)]
    result = play(sh("ls / | cat; ls -l /tool"), image=archive(members))
    assert "disk" not in result.output and "pipe" not in result.output and "-rwxr-xr-x" in result.output
    tools = list((tmp_path / "cache").glob("images/*/tool"))
    assert tools and not tools[0].stat().st_mode & (stat.S_ISUID | stat.S_ISGID)


def test_an_image_without_a_shell_is_refused(pool, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError):
        asyncio.run(pool.open(str(tmp_path / "empty")))
    assert not list((tmp_path / "cache" / "images").iterdir())


def test_a_damaged_archive_is_refused(pool, archive, tmp_path):
    path = tmp_path / "half.tar"
    with open(archive(), "rb") as whole:
        path.write_bytes(whole.read()[:100_000])
    with pytest.raises(ConfigError):
        asyncio.run(pool.open(str(path)))
    assert not list((tmp_path / "cache" / "images").iterdir())


def test_an_archive_is_unpacked_once(play, archive, tmp_path):
    path = archive()
    play(sh("true"), image=path)
    [tree] = (tmp_path / "cache" / "images").iterdir()
    made = tree.stat().st_ctime_ns
    with pytest.MonkeyPatch.context() as patch:
        pool = Workspaces()
        patch.setattr("rl4llm.extensions.workspaces.images._run", None)
        play(sh("true"), image=path, pool=pool)
        pool.close()
    assert [entry.stat().st_ctime_ns for entry in (tmp_path / "cache" / "images").iterdir()] == [made]


OTHER = b"of another platform, so it is not read"


@pytest.fixture
def layout(image, tmp_path):
    """Return layout(*layers, config): an OCI layout of the small image and layers of members, behind two indexes."""

    def made(*layers, config=None):
        root = tmp_path / "layout"
        (root / "blobs" / "sha256").mkdir(parents=True)

        def blob(content, **keys):
            digest = hashlib.sha256(content).hexdigest()
            (root / "blobs" / "sha256" / digest).write_bytes(content)
            return {"digest": f"sha256:{digest}", "size": len(content), **keys}

        blobs = []
        for number, members in enumerate(((), *layers)):
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w") as tar:
                if number == 0:
                    tar.add(image, ".")
                for one, content in members:
                    tar.addfile(one, io.BytesIO(content))
            blobs.append(blob(gzip.compress(buffer.getvalue())))
        settings = blob(json.dumps({"config": config or {}}).encode())
        manifest = json.dumps({"config": settings, "layers": blobs}).encode()
        machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
        here = {"os": "linux", "architecture": machine}
        elsewhere = [here | {"os": "windows"}, here | {"architecture": "s390x"}]
        entries = [blob(OTHER, platform=other) for other in elsewhere]
        inner = blob(json.dumps({"manifests": [*entries, blob(manifest, platform=here)]}).encode())
        (root / "index.json").write_text(json.dumps({"manifests": [inner]}))
        (root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        return root

    return made


def test_layers_replace_and_remove_what_is_below(play, layout):
    first = [
        member("data/added", content=b"1"),
        member("etc/x", content=b"1"),
        member("etc/sub/old", content=b"1"),
        member("data/.wh.removed"),
    ]
    second = [
        member("data/kept", content=b"second\n"),
        member("etc/sub/new", content=b"2"),
        member("etc/.wh..wh..opq"),
        member("etc/y", content=b"2"),
    ]
    root = layout(first, second, config={"Env": ["NAME=of the=image"], "WorkingDir": "/data"})
    result = play(sh("pwd; echo $NAME; ls; cat kept; ls /etc /etc/sub"), image=str(root))
    assert result.output == (
        "/data\nof the=image\nadded\nkept\nmoved\nsecond\n/etc:\nsub\ny\n\n/etc/sub:\nnew\n"
    )


def test_a_layer_never_removes_its_own_files(play, layout):
    layer = [member("data/kept", content=b"mine\n"), member("data/.wh.kept"), member(".wh.data")]
    assert play(sh("ls /data; cat /data/kept"), image=str(layout(layer))).output == "kept\nmine\n"


def test_a_directory_of_a_layer_replaces_a_link(play, layout):
    first = [member("door", tarfile.SYMTYPE, "data"), member("data/.wh.moved")]
    second = [member("door", tarfile.DIRTYPE, mode=0o755), member("door/kept", content=b"new\n")]
    result = play(sh("cat /data/kept /door/kept; ls /door"), image=str(layout(first, second)))
    assert result.output == "old\nnew\nkept\n"


def test_a_tar_of_a_file_system_has_no_whiteouts(play, archive):
    members = [member("data/.wh.kept", content=b"a file\n"), member("data/.wh..wh..opq")]
    assert play(sh("cat /data/kept /data/.wh.kept"), image=archive(members)).output == "old\na file\n"


def test_a_layout_is_the_base_of_a_dockerfile(play, layout, tmp_path):
    root = layout([member("data/added", content=b"1\n")], config={"Env": ["A=b"], "WorkingDir": "/data"})
    (tmp_path / "Dockerfile").write_text(f"FROM {root.name}\nRUN echo $A >> added\n")
    assert play(sh("pwd; cat added"), image=str(tmp_path)).output == "/data\n1\nb\n"


WHITEOUTS = ESCAPES | {
    "a whiteout behind a link": [member("door", tarfile.SYMTYPE, "/{out}"), member("door/.wh.victim")],
    "a whiteout of a parent": [member("../../{out}/.wh...")],
    "a whiteout of a directory itself": [member("/{out}/.wh..")],
    "a whiteout without a name": [member("/{out}/.wh.")],
}


@pytest.mark.parametrize("name", WHITEOUTS)
def test_a_layer_does_not_change_what_is_outside(name, play, layout, tmp_path):
    out, members = outside(tmp_path, WHITEOUTS[name])
    try:
        result = play(sh("cat /hard /door/victim /it"), image=str(layout(members)))
    except ConfigError:
        result = None
    assert [path.name for path in out.iterdir()] == ["victim"] and (out / "victim").read_text() == "mine"
    assert result is None or "mine" not in result.output


def test_a_damaged_blob_is_refused(pool, layout, tmp_path):
    root = layout()
    for blob in (root / "blobs" / "sha256").iterdir():
        content = blob.read_bytes()
        if content != OTHER:
            blob.write_bytes(content + b" ")
            with pytest.raises(ConfigError):
                asyncio.run(pool.open(str(root)))
            blob.write_bytes(content)
    assert not list((tmp_path / "cache" / "images").iterdir())


def test_a_digest_that_climbs_is_never_read(pool, layout, tmp_path):
    root = layout()
    content = json.loads((root / "index.json").read_text())
    [inner] = content["manifests"]
    (tmp_path / "outside").write_bytes((root / "blobs/sha256" / inner["digest"][7:]).read_bytes())
    inner["digest"] = "sha256:../../../outside"
    (root / "index.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError):
        asyncio.run(pool.open(str(root)))


@pytest.mark.parametrize("count", [0, 2])
def test_a_layout_has_one_image_for_this_machine(count, pool, layout):
    root = layout()
    (root / "index.json").write_text(
        json.dumps({"manifests": [{"digest": f"sha256:{n}"} for n in range(count)]})
    )
    with pytest.raises(ConfigError):
        asyncio.run(pool.open(str(root)))


DOCKERFILE = """
# a comment
FROM {base}
ENV GREETING="hello there" OTHER=x
WORKDIR /app
COPY files/ /app/files/
COPY one.txt two.txt ./
RUN echo ${GREETING} > greeting && \\
    mkdir sub
RUN ["/bin/sh", "-c", "rm /data/removed"]
CMD ["ignored"]
"""


@pytest.fixture
def context(image, tmp_path):
    root = tmp_path / "context"
    (root / "files").mkdir(parents=True)
    (root / "files" / "inner.txt").write_text("inner\n")
    (root / "one.txt").write_text("one\n")
    (root / "two.txt").write_text("two\n")
    (root / "Dockerfile").write_text(DOCKERFILE.replace("{base}", str(image)))
    return root


def test_a_dockerfile_is_built_without_docker(play, context, tmp_path):
    scenario = sh(
        "pwd; echo $GREETING; cat greeting one.txt two.txt files/inner.txt; ls -d sub; ls /data/removed"
    )
    result = play(scenario, image=str(context))
    assert (
        result.output.startswith("/app\nhello there\nhello there\none\ntwo\ninner\nsub\n")
        and result.code != 0
    )
    trees = len(list((tmp_path / "cache" / "images").iterdir()))
    play(scenario, image=str(context))
    assert len(list((tmp_path / "cache" / "images").iterdir())) == trees == 2  # the base and the result


def test_a_dockerfile_extends_the_path_of_every_program(play, context):
    with open(context / "Dockerfile", "a") as file:
        file.write("ENV PATH=/opt/x:$PATH\nRUN touch found\n")
    result = play(sh("echo $PATH; ls found"), image=str(context))
    assert result.output.startswith("/opt/x:/") and ":/bin" in result.output and "found" in result.output


def test_variables_of_a_dockerfile_have_their_values(play, context):
    with open(context / "Dockerfile", "a") as file:
        file.write('ENV APP=/srv/app NAME="two ${MISSING}words"\nENV LATER=$APP/later\n')
        file.write('WORKDIR $APP\nCOPY one.txt ${LATER}/\nWORKDIR "$APP/$NAME"\n')
    result = play(sh("pwd; cd /srv/app; cat later/one.txt; ls"), image=str(context))
    assert result.output == "/srv/app/two words\none\nlater\ntwo words\n"


EVIL = """
#include <fcntl.h>
__attribute__((constructor)) static void run(void) { open("/data/PWNED", O_CREAT | O_WRONLY, 0644); }
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_packing_an_image_runs_no_code_of_it(play, context, tmp_path):
    (tmp_path / "evil.c").write_text(EVIL)
    library = context / "files" / "libnss_evil.so.2"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "evil.c"], check=True)
    (context / "files" / "nsswitch.conf").write_text("passwd: evil\ngroup: evil\n")
    with open(context / "Dockerfile", "a") as file:
        file.write("COPY files/nsswitch.conf /etc/\nCOPY files/libnss_evil.so.2 /lib/\n")
    result = play(sh("ls /data; cat /etc/nsswitch.conf"), image=str(context))
    assert "evil" in result.output and "kept" in result.output and "PWNED" not in result.output


def test_no_module_is_imported_from_a_tree(tmp_path):
    (tmp_path / "planted.py").write_text("open('/imported', 'w')")
    tmp_path.chmod(0o777)
    code = """
import os, sys
from rl4llm.extensions.workspaces import namespaces, tree
os.chdir(sys.argv[1])
if pid := namespaces.enter():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
namespaces.become_root()
sys.path.insert(0, "/")
tree.lock_into(".")
print("locked", flush=True)
import planted"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout == "locked\n" and done.returncode == 1, done.stderr
    assert not (tmp_path / "imported").exists()


def test_a_copied_file_never_replaces_a_directory(play, context):
    lines = (
        "RUN echo b > /data/b.txt && chmod 700 /data",
        "COPY one.txt /data",
        "WORKDIR /new",
        "WORKDIR /",
        "COPY two.txt /new",
        "COPY files /data",
    )
    text = (context / "Dockerfile").read_text()
    (context / "Dockerfile").write_text("\n".join((text, *lines)))
    result = play(sh("cd /data; cat b.txt one.txt inner.txt /new/two.txt; stat -c %a ."), image=str(context))
    assert result.output == "b\none\ninner\ntwo\n700\n"


@pytest.mark.parametrize(
    "line",
    [
        "USER nobody",
        "ARG VERSION=1",
        "ENV NAME value",
        "RUN --network=host true",
        "COPY ../secret /x",
        "COPY missing /x",
        "RUN false",
        "FROM python:3.12",
        "VOLUME /data",
        "NONSENSE x",
        "ENV BIN=${MISSING:-/usr/bin}",
        "ENV PRICE='$PATH'",
        "ENV PRICE=\\$PATH",
        "WORKDIR ${OTHER#x}",
        "COPY one.txt $1/",
    ],
)
def test_a_dockerfile_that_cannot_be_followed_is_refused(line, pool, context):
    text = (context / "Dockerfile").read_text()
    (context / "Dockerfile").write_text(line if line.startswith("FROM") else f"{text}\n{line}\n")
    with pytest.raises(ConfigError):
        asyncio.run(pool.open(str(context)))


def test_the_cache_is_whole_or_missing_for_processes_that_race(archive, tmp_path, _walls):
    code = """
import asyncio, sys
from rl4llm.extensions.workspaces import Workspaces
async def main():
    pool = Workspaces(image=sys.argv[1])
    workspace = await pool.open()
    print((await workspace.run(["cat", "/data/kept"], wall_s=60)).output)
    await workspace.close(); pool.close()
asyncio.run(main())"""
    environ = {**os.environ, "PYTHONPATH": os.getcwd()}
    path = archive()
    command = [os.sys.executable, "-c", code, path]
    racing = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0] for process in racing] == ["old\n\n"] * 3
    assert len(list((tmp_path / "cache" / "images").iterdir())) == 1
