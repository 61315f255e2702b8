"""How much hypothesis tries."""

from hypothesis import HealthCheck, Phase, settings


def quick(num_examples):
    """The same examples in every run, so that the suite is reproducible."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(
        max_examples=num_examples, derandomize=True, deadline=None, database=None, suppress_health_check=checks
    )


def thorough(num_examples):
    """New examples in every run; a failure prints how to repeat it."""
    return settings(quick(num_examples), derandomize=False, print_blob=True)


def unshrunk(profile):
    """A failure ends the processes of a pool, so looking for a smaller one would take minutes."""
    return settings(profile, phases=[Phase.explicit, Phase.generate])
