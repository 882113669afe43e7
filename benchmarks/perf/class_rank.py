"""What the factored head costs: the held-out kernel error against the rank r over classes, r = C being the dense head.

A network of 20 → 64 → 64 → 100 trained on 100 Gaussian clusters; the head alone differs between the fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from networks import mlp
from torch import Tensor
from torch.nn import functional as F

from scalla import ScaLLA
from scalla.benchmark.clock import now


def clusters(num: int, num_classes: int, *, seed: int) -> tuple[Tensor, Tensor]:
    centres = 2 * torch.randn(num_classes, 20, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(num_classes, (num,), generator=generator)
    return centres[y] + torch.randn(num, 20, generator=generator), y


def measure(*, quick: bool) -> Iterator[dict[str, Any]]:
    num_classes, m, steps, ranks = (6, 4, 3, (2, 6)) if quick else (100, 100, 400, (8, 32, 100))
    x, y = clusters(100 if quick else 4000, num_classes, seed=1)
    held = clusters(5 if quick else 20, num_classes, seed=2)[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = mlp(20, 64, 2, num_classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(2 if quick else 8):
        for a, b in zip(x.split(50), y.split(50), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(a), b).backward()
            optimizer.step()
    loader = list(zip(x.split(50), y.split(50), strict=True))
    for kind in ("mirror", "trunk"):
        for rank in ranks:
            began = now().cpu
            la = ScaLLA(model, num_features=m, surrogate=kind, surrogate_options={"class_rank": rank})
            la.fit(loader, num_steps=steps, num_probes=4)
            spent = now().cpu - began
            error = la.kernel_error(held)
            assert la.surrogate is not None
            yield {
                "surrogate": kind,
                "classes": num_classes,
                "class_rank": rank,
                "num_features": m,
                "error": error.error,
                "floor": error.floor,
                "weights": sum(p.numel() for p in la.surrogate.parameters()),
                "seconds": spent,
            }
