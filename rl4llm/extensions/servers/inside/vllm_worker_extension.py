"""Methods for a vLLM server's workers: load weights from a directory, and report their version.

This file runs in the server's environment, without rl4llm, and imports nothing of it:

    VLLM_SERVER_DEV_MODE=1 PYTHONPATH=rl4llm/extensions/servers/inside vllm serve MODEL \\
        --worker-extension-cls vllm_worker_extension.WeightsExtension

vLLM mixes the class into its worker class, so all names begin with "rl4llm". The version is stored in the worker, not
in the API server: a restarted server reports -1, and so does one whose last load failed half-way.
"""

import secrets
from pathlib import Path
from typing import Any

from safetensors import safe_open

NEVER_LOADED = -1


class WeightsExtension:
    """Methods of every worker, called through ``POST /collective_rpc``; arguments arrive as strings."""

    rl4llm_version = NEVER_LOADED
    rl4llm_state_id = ""
    rl4llm_replaced_id = ""
    rl4llm_asleep = ""
    rl4llm_shapes: dict[str, tuple[int, ...]] | None = None
    vllm_config: Any  # this and the following attributes belong to the worker
    model_runner: Any
    device: Any
    list_loras: Any
    reload_weights: Any

    def rl4llm_state(self) -> dict[str, Any]:
        """Return the version of the weights, an id that changes whenever they change, the id before, how log-probs are
        computed, what sleeps, and whether `sleep` frees memory. On a CPU it never does, and is accepted nevertheless.
        """
        if not self.rl4llm_state_id:
            self._rl4llm_hold(NEVER_LOADED)
        return {
            "version": self.rl4llm_version,
            "id": self.rl4llm_state_id,
            "replaced": self.rl4llm_replaced_id,
            "logprobs_mode": str(self.vllm_config.model_config.logprobs_mode),
            "adapters_leak": self._rl4llm_adapters_leak(),
            "can_sleep": self.device.type == "cpu" or bool(self.vllm_config.model_config.enable_sleep_mode),
            "asleep": self.rl4llm_asleep,
        }

    def rl4llm_load(self, path: str, version: str) -> dict[str, Any]:
        """Replace the weights by those of a Hugging Face directory.

        Names and shapes are checked first, since vLLM does not survive a load that fails half-way.
        """
        shapes = shapes_of(Path(path))
        if self.rl4llm_shapes is not None and self.rl4llm_shapes != shapes:
            raise ValueError(f"{path} is refused: {difference(self.rl4llm_shapes, shapes)}")
        self._rl4llm_hold(NEVER_LOADED)  # stays if loading fails, since half of the weights may be new
        self.reload_weights(weights_path=path)
        if self.device.type == "cpu":
            self._rl4llm_pack_again()
        self.rl4llm_shapes = shapes
        self.rl4llm_version = int(version)  # the same id: nothing samples before the load has ended
        return self.rl4llm_state()

    def rl4llm_note(self, asleep: str) -> dict[str, Any]:
        """Keep what a trainer puts to sleep, such as "kv_cache,weights", for itself and for the next trainer."""
        self.rl4llm_asleep = asleep
        return self.rl4llm_state()

    def _rl4llm_hold(self, version: int) -> None:
        self.rl4llm_version = version
        self.rl4llm_replaced_id, self.rl4llm_state_id = self.rl4llm_state_id, secrets.token_hex(8)

    def _rl4llm_adapters_leak(self) -> bool:
        """Return whether requests without an adapter may get one: vLLM's LoRA code for CPUs does that in batches."""
        return self.device.type == "cpu" and bool(self.vllm_config.lora_config) and bool(self.list_loras())

    def _rl4llm_pack_again(self) -> None:
        """Repack the weights: on a CPU, layers compute with a packed copy that a reload does not update, and experts with
        packed weights that it replaces by plain ones."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        for module in self.model_runner.get_model().modules():
            weight = getattr(module, "weight", None)
            if "cpu_linear" in vars(module) and weight is not None and weight.ndim == 2 and weight.numel():
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
            experts = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if experts is not None:
                experts.fused_experts.process_weights_after_loading(module)


def shapes_of(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a directory's tensors. Raises an error for a file that is missing or truncated."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} contains no safetensors files, as seen from the server.")
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def difference(known: dict[str, tuple[int, ...]], given: dict[str, tuple[int, ...]]) -> str:
    """Describe the first tensor that differs, or return ""."""
    for name in sorted(known.keys() | given.keys()):
        if known.get(name) != given.get(name):
            return f"{name} has shape {given.get(name)}, but had {known.get(name)} in the previous version"
    return ""
