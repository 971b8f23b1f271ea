"""What a run writes holds no secret, reads back, and still identifies the run."""

import os
import stat

import pytest
import yaml

from rl4llm.compose import build_trainer
from rl4llm.config import load_config
from rl4llm.core.errors import ConfigError, RunDirError
from rl4llm.core.redact import HIDDEN
from rl4llm.extensions.export.card import model_card
from rl4llm.extensions.launch.launchers import prepared
from rl4llm.extensions.view.export import export
from rl4llm.extensions.view.run import find_runs
from rl4llm.runs.run_dir import RunDir

TEXT = """
model: {path: "${oc.env:MODEL}"}
data: {path: arithmetic, limit: 4}
eval: {every: 0}
rollout: {prompts: 1, group_size: 2, max_tokens: 4}
rewards: [{name: length, max_length: 9}]
inference: {name: sglang, url: "http://me:${oc.env:DOOR}@127.0.0.1:9", api_key: "${oc.env:OWN}"}
tracking: {tensorboard: false}
"""
SECRETS = {"DOOR": "door-secret", "OWN": "own-secret"}
FLAGS = ["--admin-api-key", "literal-secret"]


@pytest.fixture
def config_file(tmp_path, model_dir, monkeypatch):
    for name, value in {**SECRETS, "MODEL": str(model_dir)}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "given.yaml").write_text(TEXT)
    return tmp_path / "given.yaml"


def opened(config_file, **keys):
    """Return the directory of the run after one more start."""
    with build_trainer(
        load_config(config_file, {"output.dir": str(config_file.parent / "run"), **keys})
    ) as trainer:
        trainer.claim()
        return trainer.run


def files_with(text, directory):
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert files
    return [path for path in files if text in path.read_bytes()]


def test_files_of_a_run_keep_references_and_hold_no_secret(config_file, tmp_path):
    umask = os.umask(0)
    try:
        run = opened(config_file, **{"launch.server_flags": FLAGS})
    finally:
        os.umask(umask)
    shown = yaml.safe_load(run.config_file.read_text())
    assert shown["inference"]["api_key"] == "${oc.env:OWN}" and shown["model"]["path"] == "${oc.env:MODEL}"
    assert shown["inference"]["url"] == "http://me:${oc.env:DOOR}@127.0.0.1:9"
    assert shown["launch"]["server_flags"] == ["--admin-api-key", HIDDEN]
    assert not files_with(b"-secret", run.path)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (run.config_file, run.run_file)} == {0o600}
    assert load_config(run.config_file).inference["api_key"] == "own-secret"
    card = str(model_card(load_config(run.config_file), 1, []))
    assert "-secret" not in card


def test_page_hides_secrets_that_an_older_run_wrote(config_file, tmp_path):
    run = opened(config_file)
    (run.path / "episodes").mkdir(exist_ok=True)
    old = "inference: {name: sglang, api_key: own-secret}\nrewards: [{url: 'http://me:door-secret@h/v1'}]\n"
    run.config_file.write_text(old)
    export(find_runs([run.path]), tmp_path / "page.html", 1)
    page = (tmp_path / "page.html").read_bytes()
    assert HIDDEN.encode() in page and b"-secret" not in page


def test_another_value_of_a_secret_or_variable_is_the_same_run(config_file, monkeypatch, tmp_path):
    opened(config_file)
    monkeypatch.setenv("OWN", "new-secret")
    assert opened(config_file).changes == ()
    (tmp_path / "moved").symlink_to(os.environ["MODEL"])
    monkeypatch.setenv("MODEL", str(tmp_path / "moved"))
    run = opened(config_file)
    assert [change.split(":")[0] for change in run.changes] == ["environment.MODEL"]  # reported, and taken
    with pytest.raises(RunDirError):
        opened(config_file, **{"model.path": os.environ["MODEL"] + "/."})


def test_the_secret_of_another_run_is_not_shown(tmp_path):
    RunDir.open(
        tmp_path, {"inference.api_key": "own-secret", "inference.url": "http://me:door-secret@host:9"}
    ).close()
    with pytest.raises(RunDirError) as refused:
        RunDir.open(tmp_path, {"inference.api_key": HIDDEN, "inference.url": "http://other:9"})
    assert "-secret" not in str(refused.value)


def test_a_hidden_secret_is_missed_only_where_it_is_needed(config_file, monkeypatch):
    run = opened(config_file, **{"inference.api_key": "own-secret"})
    monkeypatch.delenv("DOOR")
    config = load_config(run.config_file, of_run=True)  # as export and replay read it
    assert config.inference["api_key"] == HIDDEN == config.inference["url"]
    with pytest.raises(ConfigError):
        load_config(run.config_file)
    monkeypatch.setenv("DOOR", "door-secret")
    with pytest.raises(ConfigError):
        build_trainer(load_config(run.config_file))


@pytest.mark.parametrize(
    "key", ["training.lr", "model.dtype", "tracking.wandb", "rollout.top_k", "parts.a.data.limit"]
)
def test_an_unset_variable_is_named_where_none_can_be_hidden(key):
    keys = {"model.path": "m", "data.path": "d", "data.system_prompt": "${oc.env:UNSET}"}
    assert load_config(overrides=keys, of_run=True).data.system_prompt == HIDDEN
    with pytest.raises(ConfigError, match="NEEDED"):
        load_config(overrides={**keys, key: "${oc.env:NEEDED}"}, of_run=True)


def test_files_for_other_machines_name_the_variables_of_secrets(config_file, tmp_path):
    keys = [
        "launch.servers=1",
        f"output.dir={tmp_path}/run",
        "inference.url=null",
        "inference.api_key=${oc.env:OWN}",
    ]
    _, files, _, job = prepared("slurm", str(config_file), keys, options={}, out=tmp_path)
    assert "OWN" in job.secrets and "MODEL" not in job.secrets
    text = yaml.safe_load(files["config.yaml"])
    assert text["inference"]["api_key"] == "${oc.env:OWN}" and text["model"]["path"] == os.environ["MODEL"]
    with pytest.raises(ConfigError):
        prepared("slurm", str(config_file), [*keys, "inference.api_key=own-secret"], options={}, out=tmp_path)


def test_a_reference_to_a_reference_stays_a_reference(monkeypatch):
    monkeypatch.setenv("OWN", "own-secret")
    chain = {
        "model.path": "m",
        "data.path": "d",
        "inference.api_key": "${oc.env:OWN}",
        "env.note": "${inference.api_key}",
    }
    config = load_config(overrides=chain)
    assert config.env["note"] == "own-secret"
    assert (
        config.stored()["env"]["note"]
        == "${inference.api_key}"
        == config.stored(elsewhere=True)["env"]["note"]
    )


@pytest.mark.parametrize(
    "keys",
    [
        {
            "inference.key": "${oc.env:PLAIN}",
            "rewards": [{"name": "a", "url": "http://j?k=${inference.key}"}],
        },
        {"env.auth": "${oc.env:PLAIN}", "env.api_key": "pre-${env.auth}", "env.note": "see ${.auth}"},
        {
            "env.auth": "${oc.env:PLAIN}",
            "env.more": "${env.auth}-2",
            "env.note": "x${env[more]}",
            "env.api_key": "y${.note}",
        },
        {"env.api_key": "${oc.env:PLAIN}", "env.note": "x ${oc.select:env.api_key}"},
        {"env.api_key": "${oc.env:PLAIN}", "env.note": "x ${env.${env.which}}", "env.which": "api_key"},
        {"env.api_key": "${oc.env:PLAIN}", "parts.a.env.note": "x ${ env.api_key }"},
        {"env.judge": {"api_key": "${oc.env:PLAIN}"}, "rewards": [{"name": "a", "judge": "${env.judge}"}]},
        {"env.api_key": "own-secret", "env.note": "x ${env.api_key}"},
        {"env.note": "x ${oc.env:OWN_TOKEN}", "env.more": "y ${env.note}"},
    ],
)
def test_secrecy_follows_references_both_ways(keys, monkeypatch):
    for name in ("PLAIN", "OWN_TOKEN"):
        monkeypatch.setenv(name, "own-secret")
    monkeypatch.setenv("OTHER", "plain")
    config = load_config(overrides={"model.path": "${oc.env:OTHER}", "data.path": "d", **keys})
    for elsewhere in (False, True):
        assert "own-secret" not in config.to_yaml(elsewhere=elsewhere)
    variables = config.variables()
    assert not variables.pop("OTHER") and all(variables.values())
    assert config.stored(elsewhere=True)["model"]["path"] == "plain"
