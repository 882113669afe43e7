"""z_v(x) = J(x) v: the derivative of the outputs along a direction in parameter space.

Forward mode costs about two forward passes and no activation memory. Some kernels have no forward-mode
rule (fused attention, mkldnn's LSTM, `weight_norm`): then, in this order, slower kernels that have one,
and last J v as the derivative of u ↦ Jᵀu (reverse mode twice). Before a fit, each route is put to the
adjoint test ⟨u, J v⟩ = ⟨Jᵀ u, v⟩ on two inputs, so a route that is silently wrong is never taken.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import jvp, vmap

from scalla.device import in_autocast
from scalla.functional import FrozenNetwork, Params, first_rows
from scalla.probes import draw_probe
from scalla.types import InputError, Inputs, UnsupportedModuleError

Tangent = dict[str, Tensor]


@dataclass(frozen=True)
class Route:
    """One way to differentiate: forward mode or twice reverse mode, with which kernels switched off."""

    name: str
    forward_mode: bool = True
    plain_attention: bool = False
    without_mkldnn: bool = False


ROUTES = (
    Route("forward"),
    Route("forward, plain attention", plain_attention=True),
    Route("forward, plain attention, no mkldnn", plain_attention=True, without_mkldnn=True),
    Route("double vjp", forward_mode=False, plain_attention=True),
    Route("double vjp, no mkldnn", forward_mode=False, plain_attention=True, without_mkldnn=True),
)
_NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
FORWARD_ROUTES = tuple(route for route in ROUTES if route.forward_mode)


class JacobianProduct:
    """x, directions v_1 … v_S → J(x) v_s, by the first route that passes the adjoint test."""

    def __init__(
        self, network: FrozenNetwork, params: Params, x: Inputs, *, autocast: torch.dtype | None = None
    ) -> None:
        """With `autocast`, the network runs in that dtype (torch.autocast); the products are in float32."""
        # A twin of its own: functional_call swaps weights in it, which a concurrent prediction must not see.
        self.network = FrozenNetwork(network.model, dict_key_y=network.dict_key_y)
        self.params = params
        self.autocast = autocast
        if autocast is not None:
            for module in self.network.twin.modules():
                if isinstance(module, _NORMALISATIONS):
                    module.register_forward_pre_hook(_in_float32)
        with warnings.catch_warnings():
            # By torch itself, once, at the first forward-mode derivative: not for users who turn warnings into errors.
            warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
            self.route = self._preflight(first_rows(x, 2))
        # vmap turns a convolution with S weights into a slow grouped one: there a loop is faster.
        convolutions = any(isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d) for m in self.network.twin.modules())
        self.shares_primal = self.route.forward_mode and not convolutions and self._vmap_works(first_rows(x, 2))

    def __call__(self, x: Inputs, directions: Sequence[Tangent]) -> Float[Tensor, "B C S"]:
        f = self._at(x)
        with switched(self.route):
            if len(directions) > 1 and self.shares_primal:
                return _many(f, self.params, directions)
            return torch.stack([_one(f, self.params, v, self.route) for v in directions], -1)

    def transposed(self, x: Inputs, cotangent: Float[Tensor, "B C"]) -> Tangent:
        """J(x)ᵀ u, summed over the batch."""
        leaves = {k: p.detach().clone().requires_grad_() for k, p in self.params.items()}
        with torch.enable_grad(), switched(ROUTES[0]):
            outputs = self._at(x)(leaves)
            grads = torch.autograd.grad(outputs, list(leaves.values()), cotangent.to(outputs), materialize_grads=True)
        return dict(zip(leaves, grads, strict=True))

    def _at(self, x: Inputs) -> Callable[[Params], Float[Tensor, "B C"]]:
        """params → f(params, x), in lower precision where that was asked for."""
        return in_autocast(self.network.at(x), self.autocast, self.network.device)

    def _preflight(self, x: Inputs) -> Route:
        f = self._at(x)
        try:
            cotangent, pullback = _random_vjp(f, self.params)
        except (RuntimeError, NotImplementedError) as error:
            module = self._offending_module(x, lambda: _random_vjp(f, self.params))
            raise UnsupportedModuleError(
                f"the network cannot be differentiated: {module} failed in reverse mode ({_first_line(error)}). "
                "Replace that module, or leave it out of the kernel by parameters=..."
            ) from error
        # Along v = Jᵀu / ‖Jᵀu‖ the test reads ⟨u, J v⟩ = ‖Jᵀu‖: nothing cancels, so a wrong route shows.
        wanted = torch.stack([g.double().square().sum() for g in pullback.values()]).sum().sqrt()
        if not bool(torch.isfinite(wanted)):
            raise InputError(
                "the derivatives of the network's outputs in its weights are NaN or infinite at the first inputs (a "
                "square root or a norm at zero, a logarithm?); mend the network, or leave those weights out by "
                "parameters=..."
            )
        direction = {k: (g / wanted.clamp_min(1e-30)).to(g.dtype) for k, g in pullback.items()}
        in_16_bits = self.autocast is not None or torch.finfo(cotangent.dtype).bits == 16
        tolerance = 0.1 if in_16_bits else 1e-3
        problems: list[str] = []
        for route in ROUTES:
            try:
                with switched(route):
                    z = _one(f, self.params, direction, route)
            except (RuntimeError, NotImplementedError) as error:
                problems.append(f"{route.name}: {_first_line(error)}")
                continue
            if abs(float((cotangent.double() * z.double()).sum() - wanted)) <= tolerance * float(wanted):
                return route
            problems.append(f"{route.name}: its derivative disagrees with reverse mode")
        # Forward mode fails inside the module's own call, which can be seen; twice reverse mode fails later.
        with switched(FORWARD_ROUTES[-1]):
            module = self._offending_module(x, lambda: _one(f, self.params, direction, FORWARD_ROUTES[-1]))
        raise UnsupportedModuleError(
            f"no Jacobian-vector product through {module}. Tried: " + "; ".join(problems) + ". Replace that module "
            "(EmbeddingBag by Embedding and a mean, say) or leave its weights out by parameters=..."
            + ("" if self.autocast is None else ", or see whether autocast=None works")
        )

    def _vmap_works(self, x: Inputs) -> bool:
        """Whether S tangents in one pass give what S passes give (not all operations can be batched)."""
        directions = [draw_probe(self.params, kind="rademacher", seed=0, step=s) for s in range(2)]
        f = self._at(x)
        with switched(self.route):
            alone = torch.stack([_one(f, self.params, v, self.route) for v in directions], -1)
            try:
                together = _many(f, self.params, directions)
            except (RuntimeError, NotImplementedError):
                return False
        size = alone.abs().max()
        tolerance = 0.1 if self.autocast is not None else 1e3 * torch.finfo(alone.dtype).eps
        return bool((together - alone).abs().max() <= tolerance * size)

    def _offending_module(self, x: Inputs, attempt: Callable[[], object]) -> str:
        """The innermost module that was entered and never left when `attempt` fails."""
        stack: list[tuple[str, nn.Module]] = []
        twin = self.network.twin
        handles = []
        for name, module in twin.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                continue
            handles.append(
                module.register_forward_pre_hook(lambda mod, args, name=name: stack.append((name, mod)), prepend=True)
            )
            handles.append(module.register_forward_hook(lambda mod, args, out: stack.pop() and None))
        try:
            with contextlib.suppress(Exception):
                attempt()
        finally:
            for handle in handles:
                handle.remove()
        if stack:
            name, module = stack[-1]
            return f"module {name!r} ({type(module).__name__})"
        return f"module of type {type(twin).__name__}"


def jacobian(network: FrozenNetwork, params: Params, x: Inputs) -> dict[str, Float[Tensor, "B C *p"]]:
    """J(x) exactly, by parameter: one backward pass for each output of each input. For checks, not for fits."""
    f = FrozenNetwork(network.model, dict_key_y=network.dict_key_y).at(x)
    leaves = {k: p.detach().clone().requires_grad_() for k, p in params.items()}
    with torch.enable_grad(), switched(ROUTES[-1]):
        outputs = f(leaves)
        rows = [
            torch.autograd.grad(output, list(leaves.values()), retain_graph=True, materialize_grads=True)
            for output in outputs.flatten().unbind()
        ]
    stacked = [torch.stack(parts) for parts in zip(*rows, strict=True)]
    return {k: j.view(*outputs.shape, *p.shape) for (k, p), j in zip(params.items(), stacked, strict=True)}


def _in_float32(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Before a normalisation, which makes bf16 outputs with float32 tangents of bf16 inputs: convolutions fail."""
    return tuple(t.float() if isinstance(t, Tensor) else t for t in args)


def _one(f: Callable[[Params], Tensor], params: Params, direction: Tangent, route: Route) -> Float[Tensor, "B C"]:
    if not route.forward_mode:
        return _double_vjp(f, params, direction)
    with torch.no_grad():
        return jvp(f, (params,), (direction,))[1]


def _many(f: Callable[[Params], Tensor], params: Params, directions: Sequence[Tangent]) -> Float[Tensor, "B C S"]:
    stacked = {k: torch.stack([v[k] for v in directions]) for k in params}
    with torch.no_grad():
        return vmap(lambda v: jvp(f, (params,), (v,))[1], out_dims=-1, randomness="same")(stacked)


def _double_vjp(f: Callable[[Params], Tensor], params: Params, direction: Tangent) -> Float[Tensor, "B C"]:
    """J v = d/du ⟨Jᵀ u, v⟩: the map u ↦ Jᵀ u is linear."""
    leaves = {k: p.detach().clone().requires_grad_() for k, p in params.items()}
    with torch.enable_grad():
        outputs = f(leaves)
        u = torch.zeros_like(outputs, requires_grad=True)
        pulled = torch.autograd.grad(outputs, list(leaves.values()), u, create_graph=True, materialize_grads=True)
        inner = sum((g * direction[k]).sum() for k, g in zip(leaves, pulled, strict=True))
        (product,) = torch.autograd.grad(inner, u, materialize_grads=True)  # type: ignore[arg-type]
    return product.detach()


def _random_vjp(f: Callable[[Params], Tensor], params: Params) -> tuple[Tensor, Tangent]:
    leaves = {k: p.detach().clone().requires_grad_() for k, p in params.items()}
    with torch.enable_grad(), switched(ROUTES[0]):
        outputs = f(leaves)
        if outputs.ndim != 2:
            raise InputError(f"the network's output has shape {tuple(outputs.shape)}; wanted (B, C)")
        generator = torch.Generator("cpu").manual_seed(1)
        u = torch.randn(outputs.shape, generator=generator, dtype=torch.float32, device="cpu").to(outputs)
        grads = torch.autograd.grad(outputs, list(leaves.values()), u, materialize_grads=True)
    return u, dict(zip(leaves, grads, strict=True))


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]


# -- what PyTorch has one of for the whole process: the level of forward mode, and the switches of its kernels --

_one_thread = threading.RLock()


@contextlib.contextmanager
def switched(route: Route) -> Iterator[None]:
    """The kernels that `route` cannot use are off inside, and as before outside; one thread at a time.

    A thread that leaves forward mode takes the tangents of all others with it, and one that is put to the adjoint
    test must not do so with kernels that another has switched off.
    """
    with _one_thread, contextlib.ExitStack() as stack:
        if route.plain_attention:
            stack.callback(_set_attention, *_get_attention())
            _set_attention(False, False, False, False, True)
        if route.without_mkldnn:
            stack.callback(torch.backends.mkldnn.set_flags, bool(torch.backends.mkldnn.enabled))
            torch.backends.mkldnn.set_flags(False)
        yield


def _get_attention() -> tuple[bool, bool, bool, bool, bool]:
    return (
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    )


def _set_attention(fastpath: bool, flash: bool, efficient: bool, cudnn: bool, plain: bool) -> None:
    torch.backends.mha.set_fastpath_enabled(fastpath)
    torch.backends.cuda.enable_flash_sdp(flash)
    torch.backends.cuda.enable_mem_efficient_sdp(efficient)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    torch.backends.cuda.enable_math_sdp(plain)
