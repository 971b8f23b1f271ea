"""A pool of workspaces, and small images; where none can be had, the tests are skipped with the reason."""

import asyncio
import shutil

import pytest

from rl4llm.extensions.workspaces import WorkspaceError, Workspaces


@pytest.fixture(scope="session")
def _walls():
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed; scripts/install_sandbox.sh does it")

    async def probe():
        await (await pool.open()).close()

    pool = Workspaces()
    try:
        asyncio.run(probe())
    except WorkspaceError as error:
        pytest.skip(f"this machine has no workspaces: {error}")
    finally:
        pool.close()


@pytest.fixture(scope="module")
def pool(_walls):
    """Small limits, so that tests reach them."""
    pool = Workspaces(memory_bytes=200 << 20, processes=40, disk_bytes=64 << 20, count=8)
    yield pool
    pool.close()


@pytest.fixture
def play(pool):
    """Return play(scenario, image, sockets): what `scenario(workspace)` returns in a new workspace."""

    def played(scenario, image=None, sockets=None, pool=pool):
        async def whole():
            workspace = await pool.open(image, sockets=sockets)
            try:
                return await scenario(workspace)
            finally:
                await workspace.close()

        return asyncio.run(whole())

    return played


BUSYBOX = shutil.which("busybox")


@pytest.fixture(scope="session")
def image(tmp_path_factory):
    """A directory with the root of a small file system: a static busybox, and some data."""
    if BUSYBOX is None:
        pytest.skip("busybox is not installed: apt-get install busybox-static")
    root = tmp_path_factory.mktemp("image")
    for name in ("bin", "data", "etc", "tmp"):
        (root / name).mkdir()
    shutil.copy(BUSYBOX, root / "bin" / "busybox")
    for name in [
        "sh",
        "cat",
        "cp",
        "rm",
        "mv",
        "ls",
        "env",
        "id",
        "mkdir",
        "pwd",
        "touch",
        "chmod",
        "nc",
        "wget",
        "sleep",
    ]:
        (root / "bin" / name).symlink_to("busybox")
    for name, text in {"kept": "old\n", "removed": "gone\n", "moved": "moved\n"}.items():
        (root / "data" / name).write_text(text)
    return root
