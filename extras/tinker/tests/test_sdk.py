"""The unchanged Tinker SDK and loops of its cookbook against the server."""

import gc
import json
import os
import subprocess
import time
import weakref

import pytest
from tinker_client import KEY, NAME, put_into_cache, served_apart, served_here
from warm_python import warm_of

from rl4llm.backends.tiny import save_model
from rl4llm_tinker import server, service

IMPORTED = ("datasets", "tinker", "tinker_cookbook.recipes.math_rl.math_env", "tinker_cookbook.supervised.data",
            "transformers.models.auto.tokenization_auto")  # fmt: skip
ROWS = """
import random, runpy, sys
import datasets

def local(path, *names, split=None, **options):
    rng, rows = random.Random(0), []
    for _ in range(64):
        a, b = rng.randint(1, 9), rng.randint(1, 9)
        chat = [{"role": "user", "content": f"{a} + {b}"}, {"role": "assistant", "content": "Answer: " + str(a + b)}]
        rows.append({"messages": chat, "question": f"{a} + {b}", "answer": f"#### {a + b}"})
    parts = datasets.DatasetDict(train=datasets.Dataset.from_list(rows), test=datasets.Dataset.from_list(rows[:8]))
    return parts[split] if split else parts

datasets.load_dataset = local  # no rows are downloaded
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""

ASKS = """
import tinker
from tinker import types

def said(ask):
    try:
        ask()
    except tinker.TinkerError as error:
        return f"{type(error).__name__}: {error}"

def tensor(values, dtype):
    return types.TensorData(data=values, dtype=dtype)

name = "%(name)s"
print(said(lambda: tinker.ServiceClient(api_key="tml-other").create_lora_training_client(name).result()))
service = tinker.ServiceClient()
print([model.model_name for model in service.get_server_capabilities().supported_models])
training = service.create_lora_training_client(name, rank=4, seed=1).result()
inputs = {"target_tokens": tensor([4, 5, 6], "int64"), "logprobs": tensor([-5.0] * 3, "float32")}
inputs["advantages"] = tensor([1.0, -1.0, 0.5], "float32")
data = [types.Datum(model_input=types.ModelInput.from_ints([3, 4, 5]), loss_fn_inputs=inputs)] * 2
print(said(lambda: training.forward_backward(data, "stable_reinforce").result()))
for loss in ("importance_sampling", "ppo", "cispo", "dro"):
    assert len(training.forward_backward(data, loss).result().loss_fn_outputs) == 2

def squares(data, logprobs):
    loss = sum((row**2).sum() for row in logprobs)
    return loss, {"squares": float(loss)}

weighed = {"target_tokens": tensor([4, 5, 6], "int64"), "weights": tensor([1.0] * 3, "float32")}
data = [types.Datum(model_input=types.ModelInput.from_ints([3, 4, 5]), loss_fn_inputs=weighed)]
losses = []
for _ in range(3):
    losses.append(training.forward_backward_custom(data, squares).result().metrics["squares"])
    training.optim_step(types.AdamParams(learning_rate=0.01)).result()
assert losses[2] < losses[1] < losses[0], losses
state = training.save_state("mine").result().path
sampling = training.save_weights_and_get_sampling_client().result()
named = training.save_weights_for_sampler("mine").result().path
for made in (service.create_sampling_client(model_path=named), training.create_sampling_client(named)):
    assert made.result().get_base_model() == name
    assert made.result().sample(data[0].model_input, 1, types.SamplingParams(max_tokens=2)).result().sequences[0].tokens
scored = sampling.compute_logprobs(types.ModelInput.from_ints([3, 4, 5, 6])).result()
trained = training.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
assert scored[0] is None and all(abs(a - b) < 1e-4 for a, b in zip(scored[1:], trained)), (scored, trained)
assert len(sampling.compute_logprobs(types.ModelInput.from_ints([3] * 512)).result()) == 512  # the whole context
again = service.create_training_client_from_state_with_optimizer(state).result()
assert again.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist() == trained
service.create_rest_client().delete_checkpoint_from_tinker_path(state).result()
print(said(lambda: service.create_training_client_from_state(state).result()))
service.close("success").result()
print("done")
"""


DISAPPEARS = """
import time
import tinker
from tinker import types

service = tinker.ServiceClient()
training = service.create_lora_training_client("%(name)s", rank=4, seed=1).result()
weighed = {"target_tokens": types.TensorData(data=[4, 5, 6], dtype="int64")}
weighed["weights"] = types.TensorData(data=[1.0] * 3, dtype="float32")
data = [types.Datum(model_input=types.ModelInput.from_ints([3, 4, 5]), loss_fn_inputs=weighed)]
training._request_id_counter = training._turn_counter = 1  # as if a request had been lost on its way
try:
    training.optim_step(types.AdamParams(learning_rate=0.01)).result()
except tinker.TinkerError as error:
    print(error, flush=True)
print(len(training.forward_backward(data, "cross_entropy").result().loss_fn_outputs), flush=True)
training.save_weights_and_get_sampling_client().result()
sampling = service.create_sampling_client(base_model="%(name)s")
prompt, params = types.ModelInput.from_ints([3, 4, 5]), types.SamplingParams(max_tokens=32)
many = [sampling.sample(prompt, 64, params) for _ in range(24)]
other = tinker.ServiceClient().create_sampling_client(base_model="%(name)s")
other.sample(prompt, 1, params).result()
print("unfinished", sum(not one.done() for one in many), flush=True)
training.optim_step(types.AdamParams(learning_rate=0.01)).result()
waiting = [training.forward_backward(data * 32, "cross_entropy") for _ in range(200)]
print(training.model_id, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def warm(python_of, _model, tokenizer, tmp_path_factory):
    """Return the SDK's Python, which has imported what programs need, its environment, and a directory with a model."""
    python, home = python_of("tinker"), tmp_path_factory.mktemp("sdk")
    save_model(_model, tokenizer, home / "model")
    put_into_cache(home / "hf" / "hub", NAME, home / "model")  # where the cookbook looks for the tokenizer
    settings = {
        "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0", "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "OMP_NUM_THREADS")}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)  # some of it is read at the import
        with warm_of(python, tmp_path_factory.mktemp("warm"), *IMPORTED) as path:
            yield path, kept | settings, home


@pytest.fixture(scope="module")
def sdk(warm):
    """Return run(words): a program of the SDK's environment, a file or its text, beside a server of a small model."""
    python, environment, home = warm
    with served_apart(home / "model", home / "out") as (url, _):

        def run(program, *words):
            if isinstance(program, str):
                (home / "program.py").write_text(program)
                program = home / "program.py"
            command, env = [python, *map(str, [program, *words])], environment | {"TINKER_BASE_URL": url}
            done = subprocess.run(command, env=env, cwd=home, capture_output=True, text=True, timeout=240)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
            return done.stdout + done.stderr

        yield run


def rows_of(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_the_cookbooks_supervised_loop_learns_and_resumes(sdk, tmp_path):
    recipe = (ROWS, "tinker_cookbook.recipes.sl_loop", f"model_name={NAME}", f"log_path={tmp_path}")
    recipe += ("batch_size=8", "learning_rate=0.01", "lora_rank=8", "save_every=2")
    sdk(*recipe, "max_steps=4")
    first = [row["train_mean_nll"] for row in rows_of(tmp_path)]
    assert len(first) == 4 and first[3] < first[0]
    checkpoints = [json.loads(line) for line in (tmp_path / "checkpoints.jsonl").read_text().splitlines()]
    assert checkpoints[0]["state_path"].startswith("tinker://")
    checkpoints = checkpoints[:1]  # as if the run had been killed after it
    (tmp_path / "checkpoints.jsonl").write_text(json.dumps(checkpoints[0]) + "\n")
    assert "Resuming from batch 2" in sdk(*recipe, "max_steps=4")
    assert [row["train_mean_nll"] for row in rows_of(tmp_path)[4:]] == pytest.approx(first[2:], rel=1e-5)


def test_the_cookbooks_loop_of_reinforcement_learning_runs(sdk, tmp_path):
    recipe = (ROWS, "tinker_cookbook.recipes.rl_loop", f"model_name={NAME}", f"log_path={tmp_path}")
    sdk(*recipe, "batch_size=2", "group_size=4", "max_tokens=8", "save_every=1", "max_steps=2")
    assert [row["step"] for row in rows_of(tmp_path)] == [0, 1]


def test_the_sdk_shows_errors_and_computes_custom_losses(sdk):
    printed = sdk(ASKS % {"name": NAME})
    assert "AuthenticationError" in printed and "The API key is not this server's" in printed
    assert "RequestFailedError" in printed and "loss_fn='stable_reinforce' is unknown" in printed
    assert f"['{NAME}']" in printed and "/weights/mine cannot be used: it was not found" in printed
    assert "done" in printed.splitlines()


def test_the_example_trains_through_the_sdk(sdk):
    from test_examples import EXAMPLES

    printed = sdk(EXAMPLES / "tinker_loop.py", "--model", NAME, "--steps", 2)
    assert "step   2: mean reward" in printed and "/sampler_weights/sums" in printed


def test_a_client_of_the_sdk_that_is_killed_leaves_nothing(warm, model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(service, "GAP_S", 1.0)
    monkeypatch.setattr(server, "TIDY_S", 0.2)
    monkeypatch.setattr(server, "POLL_S", 1.0)  # polls of the client that is killed end then
    python, environment, _ = warm
    (tmp_path / "disappears.py").write_text(DISAPPEARS % {"name": NAME})
    with served_here(model_dir, tmp_path / "out") as (url, serving):
        words, environment = [python, str(tmp_path / "disappears.py")], environment | {"TINKER_BASE_URL": url}
        with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as client:
            lost, outputs, unfinished, model_id = (client.stdout.readline().strip() for _ in range(4))
            trained = weakref.ref(serving._models[model_id].backend) if model_id else None
            client.kill()
        assert "has not arrived within 1 s" in lost and outputs == "1"
        assert int(unfinished.split()[-1]) > 8
        serving._idle_s = 0.0
        deadline = time.monotonic() + 180
        held = (serving._idle, serving._models, serving._orders, serving._sampling, serving._promises)
        while trained() is not None or any(held):
            assert time.monotonic() < deadline
            gc.collect()
            time.sleep(0.1)
        assert not (tmp_path / "out" / model_id / "passing").exists()
