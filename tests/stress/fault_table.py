"""What the stress tests did: a line for each fault and promise, in Markdown, with versions and machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from scalla.benchmark.environment import hardware, versions


@dataclass
class FaultTable:
    """(fault, promise, how often, what came of it)"""

    rows: list[tuple[str, str, int, str]] = field(default_factory=list)

    def add(self, fault: str, promise: str, *, count: int, outcome: str) -> None:
        self.rows.append((fault, promise, count, outcome))

    def lines(self) -> list[str]:
        found = [f"{name} {version}" for name, version in versions().items() if version is not None]
        machine = hardware()
        return [
            "| fault | promise | times | outcome |",
            "| --- | --- | ---: | --- |",
            *(f"| {fault} | {promise} | {count:,} | {outcome} |" for fault, promise, count, outcome in self.rows),
            "",
            f"{', '.join(found)}; {machine['cpu']}, {machine['cores']} cores, {machine['system']}.",
        ]
