"""A person plays an environment in the browser, in the place of the policy."""
