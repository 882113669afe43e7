"""What the numbers say, in sentences that follow them."""

from __future__ import annotations

from scalla.demo.experiment import Demo
from scalla.demo.row import Row

#: shares that differ by less are called the same
SAME = 0.005


def headline(demo: Demo) -> str:
    """How sure the network is of what is no digit, before and after."""
    before, after = demo.row("map"), demo.row("scalla_biased")
    share = f"{100 * before.sure_of_patches():.0f}"
    return (
        f"The network reads {100 * before.accuracy:.1f}% of new digits correctly. It also takes {share}% of the "
        f"patches of a photograph for some digit with a probability of more than 90%. ScaLLA biased, fitted to the "
        f"same network afterwards, does so for {100 * after.sure_of_patches():.0f}%."
    )


def detection(demo: Demo) -> str:
    """What the scores catch at a price of five false alarms in a hundred."""
    parts = [f"{row.title} {100 * row.share_flagged:.0f}%" for row in demo.rows]
    return (
        "Let an alarm go off where a method is least sure, and set it so that it goes off for one test digit in "
        f"twenty. Of the patches it then catches: {', '.join(parts)} (each by its own score: MAP by the entropy of its "
        "probabilities, ScaLLA by the entropy of its Gaussian)."
    )


def calibration(demo: Demo) -> str:
    """What became of accuracy, likelihood and calibration."""
    before, after = demo.row("map"), demo.row("scalla_biased")
    return (
        f"On the digits themselves, ScaLLA biased {_accuracy(before, after)}; its negative log-likelihood is "
        f"{after.nll:.3f} ({_change(before.nll, after.nll)} MAP's {before.nll:.3f}), and its expected calibration "
        f"error {after.reliability.ece:.3f} ({_change(before.reliability.ece, after.reliability.ece)} "
        f"{before.reliability.ece:.3f})."
    )


def _accuracy(before: Row, after: Row) -> str:
    difference = after.accuracy - before.accuracy
    if abs(difference) < SAME:
        return f"is as accurate as MAP ({100 * after.accuracy:.2f}% against {100 * before.accuracy:.2f}%)"
    kind = "more" if difference > 0 else "less"
    return f"is {kind} accurate than MAP ({100 * after.accuracy:.2f}% against {100 * before.accuracy:.2f}%)"


def _change(before: float, after: float) -> str:
    if abs(after - before) < SAME / 5:
        return "about the same as"
    return "less than" if after < before else "more than"
