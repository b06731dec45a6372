"""A reward that raises for some samples: what a report of a troubled run is looked at with."""

from integration_training.tasks.arithmetic import close_answer


def failing_answer(sample):
    """close_answer, but it raises for a number above 30, and for an answer that holds a 7."""
    response = sample.response.strip()
    if response.isdecimal() and int(response) > 30:
        raise ValueError(f"the answer {response} is out of range: at most 30")
    if "7" in response:
        raise RuntimeError("judge at 127.0.0.1:9 did not answer: <html>503 & closed</html>")
    return close_answer(sample)
