"""Directories of the host in a workspace."""

import asyncio
import os
import shutil
import tempfile

import pytest

from rl4llm.core.errors import ConfigError
from rl4llm.extensions.workspaces import Workspaces

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


async def printed(mounts, command):
    pool = Workspaces(mounts=mounts)
    try:
        workspace = await pool.open()
        result = await workspace.run(["sh", "-c", command], wall_s=30)
        changes = await workspace.changes()
        await workspace.close()
    finally:
        pool.close()
    return result.output, changes


def test_a_mount_is_read_only_and_no_change():
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)  # workspaces have another user
        with open(f"{directory}/file", "w") as file:
            file.write("there\n")
        command = f"cat {directory}/file /opt/place/file; echo x 2>&1 > /opt/place/file || echo refused"
        output, changes = asyncio.run(printed([directory, f"{directory}:/opt/place"], command))
        assert output.split()[:2] == ["there", "there"] and output.split()[-1] == "refused"
        assert (
            changes == "" and os.listdir(directory) == ["file"] and os.stat(f"{directory}/file").st_size == 6
        )


def test_a_mount_that_is_missing_is_refused():
    with pytest.raises(ConfigError):
        Workspaces(mounts=["/no/such/directory"])
