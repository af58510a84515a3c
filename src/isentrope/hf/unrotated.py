"""One decoded token whose queries and keys stay unrotated: leave the model's rotation by cos 1 and sin 0 out.

It would be ten kernels a layer that change nothing, and a token without a CUDA graph costs what its launches cost the
host. The model's code stays as it is: an attention module gets a `forward` of its own, which is that of its class with
another function in the place of the one that rotates.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from isentrope.core.compile import values_are_readable
from isentrope.hf.introspection import skip_rotation

ROTATE = "apply_rotary_pos_emb"  # what most of transformers' attention modules rotate by: (q, k, cos, sin) → (q, k)
REPLICATE = "_replicate_for_data_parallel"  # of torch's modules
MAX_KEPT = 16  # shapes of angles, and of queries and keys


class PlainAngles:
    """What rotary modules of one model have returned in place of angles for the current token.

    Attributes:
        current: cos 1 and sin 0 of each pass over one token a row, by the identity of cos; none in other passes.
    """

    def __init__(self) -> None:
        self.current = dict[int, tuple[Tensor, Tensor]]()
        self._kept = dict[Any, tuple[Tensor, Tensor]]()
        self._forwards = dict[FunctionType, FunctionType]()

    def make(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, one: bool) -> Any:
        """Return cos 1 and sin 0 in place of a rotary module's angles; `one`: whether of one token a row."""
        if torch.compiler.is_compiling():
            return skip_rotation(module, args, kwargs, output)
        known = type(output) is tuple and len(output) == 2 and all(type(x) is Tensor for x in output)
        if not (one and known):
            self.current.clear()
            return skip_rotation(module, args, kwargs, output)
        for plain, forward in self._forwards.items():  # names of the model's module may have been replaced since
            rotation = forward.__globals__[ROTATE]
            forward.__globals__.update(plain.__globals__)
            forward.__globals__[ROTATE] = rotation
        # a graph that is captured holds what was made in it, and nothing else
        readable = values_are_readable(output[0])
        pair = self._keep(*output) if readable else skip_rotation(module, args, kwargs, output)
        if len(self.current) >= MAX_KEPT:
            self.current.clear()
        self.current[id(pair[0])] = pair
        return pair

    def _keep(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos 1 and sin 0 that are the same tensors for every token."""
        key = cos.shape, sin.shape, cos.dtype, sin.dtype, cos.device
        pair = self._kept.get(key)
        if pair is None or pair[0]._version or pair[1]._version:  # nobody has written into them
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            with torch.inference_mode(False):  # a backward may save them later
                pair = self._kept[key] = torch.ones_like(cos), torch.zeros_like(sin)
        return pair

    def get_unchanged(self, cos: Any, sin: Any) -> tuple[Tensor, Tensor] | None:
        """Return the pair that these are, if they are the current ones and nobody has written into them."""
        pair = self.current.get(id(cos))
        if pair is None or pair[0] is not cos or pair[1] is not sin:
            return None
        unchanged = cos.is_inference() or not (cos._version or sin._version)  # those of inference mode have no version
        return pair if unchanged else None

    def omit_rotation(self, module: nn.Module) -> None:
        """Let an attention module leave out the rotation by these, where its class rotates by `ROTATE`."""
        plain = type(module).forward
        # what has another forward already belongs to somebody else
        if "forward" in vars(module) or type(plain) is not FunctionType or ROTATE not in plain.__code__.co_names:
            return
        if type(plain.__globals__.get(ROTATE)) is FunctionType:
            module.__dict__["forward"] = UnrotatedForward(module, self)
            module.__dict__[REPLICATE] = Replication(module)

    def get_forward(self, plain: FunctionType) -> FunctionType:
        """Return the `forward` of a class with another function in place of the one that rotates."""
        if (forward := self._forwards.get(plain)) is None:
            names = {**plain.__globals__, ROTATE: Rotation(plain, self)}
            forward = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
            forward.__kwdefaults__ = plain.__kwdefaults__
            self._forwards[plain] = forward
        return forward

    def __reduce__(self) -> tuple[Any, ...]:
        return PlainAngles, ()


def restore_rotation(module: nn.Module) -> None:
    """Undo `PlainAngles.omit_rotation`."""
    if type(module.__dict__.get("forward")) is UnrotatedForward:
        del module.__dict__["forward"]
    if type(module.__dict__.get(REPLICATE)) is Replication:
        del module.__dict__[REPLICATE]


class UnrotatedForward:
    """The `forward` of one attention module, whose tokens are not rotated; refers to it weakly, against cycles."""

    def __init__(self, module: nn.Module, angles: PlainAngles) -> None:
        self.module, self.angles, self.plain = ref(module), angles, type(module).forward
        self.forward = angles.get_forward(self.plain)  # type: ignore[arg-type]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.module()
        plain = type(module).forward  # other libraries may have replaced it
        if torch.compiler.is_dynamo_compiling() or not self.angles.current or plain is not self.plain:
            return plain(module, *args, **kwargs)
        return self.forward(module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return UnrotatedForward, (self.module(), self.angles)


class Replication:
    """In place of `nn.DataParallel`'s copying of one module: a copy rotates as its class does, with its own weights."""

    def __init__(self, module: nn.Module) -> None:
        self.module = ref(module)

    def __call__(self) -> Any:
        module: Any = self.module()
        replica = getattr(type(module), REPLICATE)(module)
        restore_rotation(replica)
        return replica

    def __reduce__(self) -> tuple[Any, ...]:
        return Replication, (self.module(),)


class Rotation:
    """In place of a model's function that rotates: leaves out what would change nothing, and calls it for the rest."""

    def __init__(self, forward: FunctionType, angles: PlainAngles) -> None:
        self.names, self.angles = forward.__globals__, angles
        self.neutral = dict[Any, bool]()  # whether queries and keys of these shapes come out as they went in

    def __call__(self, *given: Any, **options: Any) -> Any:
        if len(given) == 4 and options.keys() <= {"unsqueeze_dim"}:  # some models rotate queries and keys apart
            query, key, cos, sin = given
            pair = self.angles.get_unchanged(cos, sin)
            if pair is not None and type(query) is type(key) is Tensor:
                call = self.names[ROTATE], query.shape, key.shape, query.dtype, key.dtype, cos.dtype, *options.values()
                neutral = self.neutral.get(call)
                if neutral is None:
                    neutral = self._check(call, query, key, pair, options)
                if neutral:
                    return query, key
        return self.names[ROTATE](*given, **options)

    def _check(
        self, call: Any, query: Tensor, key: Tensor, pair: tuple[Tensor, Tensor], options: dict[str, Any]
    ) -> bool:
        """Find out whether the model's function returns what it is given, to the bit and in the same order."""
        if not values_are_readable(query):
            return False
        given = tuple(
            torch.arange(1, x.numel() + 1, device=x.device).fmod(251).to(x.dtype).view(x.shape) for x in (query, key)
        )
        out = call[0](*given, *pair, **options)
        same = type(out) is tuple and len(out) == 2
        same = same and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(given, out, strict=True))
        if len(self.neutral) >= MAX_KEPT:
            self.neutral.clear()
        self.neutral[call] = same
        return same
