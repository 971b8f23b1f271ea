"""Black-box agents as environments: an OpenAI-compatible endpoint in front of the policy."""
