"""A policy that only ever attacks: an engine that returns given texts, with the log-probs of the trained model."""

from abuse import ANSWERS, ATTACKS

from rl4llm.core.types import Completion
from rl4llm.inference.local import LocalClient

HONEST = f"def solve(n): return {ANSWERS}[n]"
HACKS = sorted(
    {
        attack.source
        for attack in ATTACKS
        if attack.kind in ("check", "asserts")
        and attack.category in ("values", "messages", "search", "exits")
        and len(attack.source) < 250
    }
)


class Attacker(LocalClient):
    """Every fourth completion is an honest program; the others go through all hacks."""

    def __init__(self, model, tokenizer, **options):
        super().__init__(model, tokenizer, **options)
        self.tokenizer = tokenizer
        self.said = 0

    async def generate(self, prompt_ids, sampling_params, *, session=""):
        number, self.said = self.said, self.said + 1
        source = HONEST if number % 4 == 3 else HACKS[(number - number // 4) % len(HACKS)]
        tokens = [
            *self.tokenizer.encode(f"```python\n{source}\n```", add_special_tokens=False),
            self.tokenizer.eos_token_id,
        ]
        logprobs = await self.score([*prompt_ids, *tokens])
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return Completion(
            text, tuple(tokens), tuple(logprobs[len(prompt_ids) - 1 :]), "stop", await self.version()
        )
