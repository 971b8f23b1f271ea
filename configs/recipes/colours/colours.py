"""The reward of a colour's name."""


def named(completions, ground_truth, **columns):
    """Return 1 for each completion that is the right name, else 0."""
    return [float(said.strip() == name) for said, name in zip(completions, ground_truth, strict=True)]
