"""Configuration: every key and type is checked, and errors say what would be right."""

from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rl4llm.compose import build_algorithm
from rl4llm.config import flatten, load_config
from rl4llm.core.errors import ConfigError

CONFIGS = Path(__file__).parents[1] / "configs"
WHOLE = sorted([*CONFIGS.glob("*.yaml"), *CONFIGS.glob("one_card/*.yaml")])
NEEDED = ["model.path=m", "data.path=d"]


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.name)
def test_every_configuration_file_is_valid(path):
    assert load_config(path, NEEDED).max_steps > 0


@pytest.mark.parametrize(
    "override",
    [
        "trainng.lr=1", "training.lrr=1", "training.lr=fast", "rollout.prompts=2.5", "rollout.prompts=0", "training.lr=.inf",
        "training.max_grad_norm=.nan", "training.schedule=cosin", "training.betas=[a,b]", "training.betas=[0.9,.nan]",
        "data.limit=few", "model=${data}", "training=5", "env=tool", "algorithm=dapo", "training.betas={a: 1}",
        "data=rows.jsonl", "rollout.prompts=12:30", "rewards=[{name: math, name: format}]", "rewards.0.weight=1",
        "output.dir=$NOT_SET/x", "output.dir=~nobody-here/x", "max_steps", "output.dir=s3://bucket/run",
        "data.system_prompt=None", "curriculum=none", "parts={a: {seed: 1}}", "parts={a: {rollout: {temperature: 0}}}",
        "eval.path=${oc.env:NOT_SET}", "model={lora.rank: 4}", "curriculum=0", "curriculum=1.5",
    ],
)  # fmt: skip
def test_a_wrong_override_is_refused(override):
    with pytest.raises(ConfigError):
        load_config(overrides=[*NEEDED, override])


@pytest.mark.parametrize("key", ["trainng.lr", "training.lrr", "lr", "rollout.lr"])
def test_unknown_key_names_the_likely_one(key):
    with pytest.raises(ConfigError, match=r"Did you mean 'training\.lr'"):
        load_config(overrides=[*NEEDED, f"{key}=1"])


def test_options_of_a_users_class_may_be_addresses_and_none():
    option = "env={name: stepped, task: 'mine:Shop', cache: 'redis://host/0', config: none}"
    env = load_config(overrides=[*NEEDED, option]).env
    assert (env["cache"], env["config"]) == ("redis://host/0", "none")


@pytest.mark.parametrize("preset", sorted((CONFIGS / "presets").glob("*.yaml")), ids=lambda path: path.name)
def test_a_preset_is_laid_over_a_task_and_single_keys_over_both(preset):
    config = load_config(CONFIGS / "gsm8k_grpo.yaml", [str(preset), *NEEDED, "rollout.prompts=3"])
    task = load_config(CONFIGS / "gsm8k_grpo.yaml", NEEDED)
    assert config.training.lr == 1e-6
    assert config.rollout.prompts == 3
    assert (config.data.answer_pattern, config.env) == (task.data.answer_pattern, task.env)
    build_algorithm(config)


def test_a_bundled_configuration_is_found_unless_a_local_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config("configs/quickstart.yaml") == load_config(CONFIGS / "quickstart.yaml")
    assert load_config("configs/quickstart.yaml", ["configs/presets/dapo.yaml"]).algorithm["name"] == "dapo"
    for missing in ("configs/quickstat.yaml", "quickstart.yaml"):
        with pytest.raises(FileNotFoundError):
            load_config(missing)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.yaml").write_text("model: {path: mine}\ndata: {path: arithmetic}\n")
    assert load_config("configs/quickstart.yaml").model.path == "mine"


def test_overrides_win_over_the_file_and_mappings_nest():
    keys = {"training": {"lr": 1.0}, "rollout.prompts": 3, "parts": {"a": {"data.path": "p"}}}
    config = load_config(CONFIGS / "quickstart.yaml", keys)
    assert (config.training.lr, config.rollout.prompts) == (1.0, 3)
    assert config.environments["a"].data.path == "p"
    assert config.rollout.group_size == load_config(CONFIGS / "quickstart.yaml").rollout.group_size


TEXTS = [
    "#### (.*)", "run #2", "{prompt}", "2024_11_02", "010", "1.10", "1e5", "no", "true", "a: b", "[x", "'tis", "!", "-",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "key", ["data.system_prompt", "output.dir", "tracking.project", "data.answer_column"]
)
def test_a_text_key_takes_its_text_unchanged(key, text):
    assert flatten(load_config(overrides=[*NEEDED, f"{key}={text}"]).values())[key] == text


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("data.system_prompt=null", None), ("data.system_prompt=", None), ("data.system_prompt='null'", "null"),
        ('data.system_prompt="a\\nb"', "a\nb"), ('data.system_prompt="a" or "b"', '"a" or "b"'),
        ("rollout.stop=[010, 1.10, '#']", ["010", "1.10", "#"]), ("training.betas.1=0.99", [0.9, 0.99]),
        ("rollout.prompts=010", 10), ("data.limit=null", None), ("training.lr=1e-4", 1e-4), ("tracking.wandb=yes", True),
        ("curriculum=level #2", "level #2"), ("env.level=010", "010"), ("env.level=1.5", 1.5), ("env.level=#5", "#5"),
        ("env.level={a: 010}", {"a": "010"}), ("env.level=[1, no, true]", [1, "no", True]), ("env.level=12:30", "12:30"),
    ],
)  # fmt: skip
def test_the_type_of_a_key_decides_how_its_value_is_read(override, value):
    key = override.partition("=")[0].removesuffix(".1")
    assert flatten(load_config(overrides=[*NEEDED, override]).values()).get(key, value) == value
    if isinstance(value, dict):
        assert load_config(overrides=[*NEEDED, override]).env["level"] == value


@pytest.mark.parametrize("text", ["010", "no", "1.10", "12:30", "2024-11-02", "0x1F", "1_000"])
def test_a_file_reads_a_text_key_as_it_is_written(text, tmp_path):
    (tmp_path / "c.yaml").write_text(
        f"output: {{dir: {text}}}\nrollout:\n  stop: [{text}, '#']\nenv: {{level: {text}}}\n"
        f"parts: {{010: {{data: {{answer_column: {text}}}}}}}\n"
    )
    config = load_config(tmp_path / "c.yaml", NEEDED)
    written = 1.1 if text == "1.10" else text  # an option of unknown type
    assert (config.output.dir, config.rollout.stop, config.env["level"]) == (text, [text, "#"], written)
    assert config.environments["010"].data.answer_column == text


def test_a_file_may_share_values_and_leave_some_empty(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "rollout: {prompts: 010, temperature: 1e-1}\neval: {limit: ~, path: ~}\n"
        "data: {answer_column: , system_prompt: 'no'}\n"
        "parts:\n  a: &a {weight: 2, data: {path: x}}\n  b: {<<: *a, weight: 1}\n"
        "algorithm: {name: grpo, correction_high: .inf}\n"
    )
    config = load_config(tmp_path / "c.yaml", NEEDED)
    assert (config.rollout.prompts, config.rollout.temperature) == (10, 0.1)
    assert (config.eval.limit, config.eval.path, config.data.answer_column) == (None, None, None)
    assert (config.data.system_prompt, config.algorithm["correction_high"]) == ("no", float("inf"))
    assert config.parts["b"] == {"weight": 1, "data": {"path": "x"}}


@pytest.mark.parametrize(
    "content",
    ["rollout: {prompts: 12:30}", "a: 1\na: 2", "[a, b]: 1", "output: {dir: !!python/name:x y}", "hello"],
)
def test_a_file_with_anything_else_is_refused(content, tmp_path):
    (tmp_path / "c.yaml").write_text(content)
    with pytest.raises(ConfigError):
        load_config(tmp_path / "c.yaml", NEEDED)


def test_an_item_of_a_list_is_set_by_its_number(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("rewards: [math, {name: length, max_length: 5}]\nparts: {sums: {rewards: [math]}}\n")
    words = ["rewards.1.max_length=7", "rewards[0].weight=2", "parts.sums.rewards.0.weight=3"]
    config = load_config(path, [*NEEDED, *words])
    assert config.rewards == [{"name": "math", "weight": 2}, {"name": "length", "max_length": 7}]
    assert config.parts["sums"]["rewards"] == [{"name": "math", "weight": 3}]
    assert load_config(path, [*NEEDED, "rewards=[math]", "rewards.0=format"]).rewards == ["format"]
    with pytest.raises(ConfigError):
        load_config(path, [*NEEDED, "rewards.2.weight=1"])


@pytest.mark.parametrize("form", ["file", "words"])
def test_paths_may_begin_with_the_home_directory_or_a_variable(form, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch")
    given = {
        "model.path": "~/m", "data.path": "$SCRATCH/d", "eval.path": "$HOME/e", "sync.dir": "~/w", "output.dir": "~/o",
        "env.corpus": "~/docs", "algorithm.critic_path": "$SCRATCH/c", "rewards": [{"name": "model", "path": "~/r"}],
    }  # fmt: skip
    words = [f"{key}={value}" for key, value in given.items() if key != "rewards"]
    if form == "file":
        (tmp_path / "c.yaml").write_text(OmegaConf.to_yaml(OmegaConf.from_dotlist(words)))
    file = tmp_path / "c.yaml" if form == "file" else None
    config = load_config(file, ["rewards=[{name: model, path: ~/r}]", *([] if file else words)])
    found = [config.model.path, config.data.path, config.eval.path, config.sync.dir, config.output.dir]
    assert found == ["/home/me/m", "/scratch/d", "/home/me/e", "/home/me/w", "/home/me/o"]
    options = [config.env["corpus"], config.algorithm["critic_path"], config.rewards[0]["path"]]
    assert options == ["/home/me/docs", "/scratch/c", "/home/me/r"]


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("name=dapo", {"name": "dapo"}),
        ("clip_high=0.3", {"name": "grpo", "kl_coef": 0.1, "clip_high": 0.3}),
        ("name=grpo", {"name": "grpo", "kl_coef": 0.1}),
    ],
)
def test_options_stay_until_another_name_is_given(key, options, tmp_path):
    (tmp_path / "c.yaml").write_text("algorithm: {name: grpo, kl_coef: 0.1}\n")
    assert load_config(tmp_path / "c.yaml", [*NEEDED, f"algorithm.{key}"]).algorithm == options


def test_what_is_written_beside_a_run_reads_back_the_same(tmp_path):
    config = load_config(CONFIGS / "quickstart.yaml")
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "config.yaml") == config


def test_a_reference_has_the_value_of_any_layer(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "rollout: {prompts: 010}\nenv: {name: chat, size: '${rollout.prompts}'}\n"
    )
    keys = [*NEEDED, "data.limit=${env.size}", "parts.a.data.limit=${seed}", "seed=7"]
    config = load_config(tmp_path / "c.yaml", keys)
    assert (config.env["size"], config.data.limit) == (10, 10)
    assert config.environments["a"].data.limit == 7
    with pytest.raises(ConfigError):
        load_config(tmp_path / "c.yaml", [*keys, "eval.limit=${training.warmup}"])


@pytest.mark.parametrize(
    "text", ["echo ${seed}", r"\${seed} \n", r"a \\${data.path}\\", "~/x", "/a/$HOME", "no"]
)
@pytest.mark.parametrize("key", ["data.system_prompt", "data.path", "env.cache", "rollout.stop.0"])
def test_a_resolved_value_is_not_resolved_again(key, text, tmp_path, monkeypatch):
    monkeypatch.setenv("TEXT", text)
    keys = ["rollout.stop=['#']", "parts.a.eval.limit=3", "parts.b.data.answer_column=${oc.env:TEXT}"]
    config = load_config(overrides=[*NEEDED, *keys, f"{key}=${{oc.env:TEXT}}"])
    (tmp_path / "config.yaml").write_text(config.to_yaml(elsewhere=True))
    back = load_config(tmp_path / "config.yaml")
    assert back == config and back.environments == config.environments
    assert config.environments["b"].data.answer_column == text
    part = config.environments["a"]
    assert (part.rollout, part.env, part.data) == (config.rollout, config.env, config.data)


def test_an_escaped_reference_is_literal_wherever_it_is_read(tmp_path):
    config = load_config(overrides=[*NEEDED, r"data.system_prompt=Say \${seed}", "parts.a.data.limit=3"])
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    read = [config, config.environments["a"], load_config(tmp_path / "config.yaml")]
    assert [item.data.system_prompt for item in read] == ["Say ${seed}"] * 3
    assert config.stored()["data"]["system_prompt"] == "Say ${seed}"


def test_a_part_is_read_by_the_types_of_its_keys(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for keys in (
        {"data.path": "~/d", "rollout.top_p": 1},
        {"data": {"path": "~/d"}, "rollout": {"top_p": 1}},
    ):
        part = load_config(overrides={"model.path": "m", "parts": {"a": keys}}).environments["a"]
        assert (part.data.path, type(part.rollout.top_p)) == ("/home/me/d", float)
    with pytest.raises(ConfigError):
        load_config(overrides={"model.path": "m", "parts": {"a": {"data.system_prompt": "None"}}})


def test_what_is_derived_follows_a_changed_configuration(monkeypatch):
    monkeypatch.setenv("STEPS", "5")
    keys = ["max_steps=${oc.env:STEPS}", "parts.a.rollout.max_tokens=3"]
    config = load_config(overrides=[*NEEDED, *keys])
    assert (config.max_steps, config.stored()["max_steps"]) == (5, "${oc.env:STEPS}")
    changed = replace(config, max_steps=6, rollout=replace(config.rollout, prompts=2))
    assert changed.stored()["max_steps"] == 6
    part = changed.environments["a"]
    assert (part.max_steps, part.rollout.prompts, part.rollout.max_tokens) == (6, 2, 3)
    assert changed.origin.keys == {"model.path", "data.path", "max_steps", "parts.a.rollout.max_tokens"}


def test_parts_follow_a_configuration_that_is_changed_in_place():
    config = load_config(overrides=[*NEEDED, "parts.a.rollout.top_k=3"])
    config.rollout.max_tokens, config.data.path = 64, Path("other")
    config.parts["b"] = {"env.name": "tool"}
    for part in config.environments.values():
        assert (part.rollout.max_tokens, part.data.path) == (64, "other")
    assert [part.env["name"] for part in config.environments.values()] == ["chat", "tool"]


def test_a_user_sees_well_under_a_hundred_keys():
    assert len(flatten(load_config(overrides=NEEDED).values())) <= 95
