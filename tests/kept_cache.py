"""What an engine should sample that keeps its cache while the weights change, by the models' own cache."""

import torch


def by_parts(parts, prompt, tokens, temperature=1.0):
    """Return the log-probs of tokens where each (model, number of tokens) of `parts` adds to the cache of those before."""
    fed, cache, found, done = [*prompt, *tokens][:-1], None, [], 0
    ends = [len(prompt) - 1 + sum(count for _, count in parts[: place + 1]) for place in range(len(parts))]
    for (model, _), end in zip(parts, ends, strict=True):
        with torch.no_grad():
            out = model(torch.tensor([fed[done:end]]), past_key_values=cache, use_cache=True)
        found.append((out.logits[0] / temperature).log_softmax(-1))
        cache, done = out.past_key_values, end
    rows = torch.cat(found)[len(prompt) - 1 :]
    return rows.gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()
