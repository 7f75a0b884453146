"""What `vismoe/kernels/affine.py` computes, in torch: the oracle of the C++ encoder.

Codes are centred, q - 2^(bits - 1), as float32. Groups are float32 [groups, inputs]. Values per group are float64 until they are
rounded to bfloat16, and codes are chosen after that.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vismoe.kernels.affine import KEPT_RANGES, SHRINK_CODES, SMALLEST_RANGE, STEPS

__all__ = ["Quantised", "fit", "round_to_nearest"]

MOST = torch.finfo(torch.bfloat16).max


class Quantised(NamedTuple):
    """Groups as centred codes, float32 [groups, inputs], with scale and offset, float32 [groups] that bfloat16 holds exactly."""

    codes: Tensor
    scale: Tensor
    offset: Tensor


class QuantizedLine(NamedTuple):
    """weight = scale * code + offset, float64 [groups]."""

    scale: Tensor
    offset: Tensor


class Moments(NamedTuple):
    """What a fit uses of codes and weights, float64 [groups] or [trials, groups]."""

    mean_code: Tensor
    variance: Tensor  # sum of (code - mean code)^2
    covariance: Tensor  # sum of (code - mean code) * weight

    def least_squares(self, mean: Tensor) -> QuantizedLine:
        """The line from codes to weights, given the mean weight, with the smallest squared error."""
        scale = torch.where(self.variance > 0, self.covariance / self.variance, 0.0)
        return QuantizedLine(scale, mean - scale * self.mean_code)

    def explained(self) -> Tensor:
        """Squared length of the part of the weights that the codes explain, with the best scale and offset; a fit maximises
        it."""
        return torch.where(self.variance > 0, self.covariance.clamp(min=0).square() / self.variance, 0.0)


def round_to_nearest(groups: Tensor, bits: int) -> Quantised:
    """Codes spread over each group's range: no weight is further than half a scale from its restored value."""
    low, high = groups.amin(1).double(), groups.amax(1).double()
    lowest, most = -(2 ** (bits - 1)), 2**bits - 1
    offset = _bfloat16(low - lowest * (high - low) / most)
    reach = torch.maximum((high - offset) / (lowest + most), (low - offset) / lowest)  # spans the range from the rounded offset
    scale = _bfloat16(torch.where(reach < SMALLEST_RANGE, 0.0, reach))
    # Counted from the offset, not from zero: groups far from zero keep their low bits, and none overflows.
    codes = _codes(groups - offset.float()[:, None], QuantizedLine(scale, torch.zeros_like(scale)), bits)
    return Quantised(codes, scale.float(), offset.float())


def fit(groups: Tensor, bits: int) -> Quantised:
    """The half-quadratic fit; no group has a larger squared error than with `round_to_nearest`."""
    low, high = groups.amin(1).double(), groups.amax(1).double()
    centre, span = ((low + high) / 2).float(), high - low
    inverse = torch.where(span < SMALLEST_RANGE, 0.0, 1 / span)
    units = groups.sub(centre[:, None]).mul_(inverse.float()[:, None])  # within -1/2 .. 1/2
    mean, best = units.mean(1).double(), _best_moments(units, bits)
    line, explained = best.least_squares(mean), best.explained()
    length = torch.linalg.vector_norm(units, dim=1).double().square() - units.shape[1] * mean.square()
    longer = torch.where(explained > 0, length / explained, 1.0)
    scale = _bfloat16(span * line.scale * longer)
    offset = _bfloat16(centre + span * (mean - line.scale * longer * best.mean_code))
    chosen_by = QuantizedLine(scale / longer, offset + (scale - scale / longer) * best.mean_code)
    codes = _codes(units, _in_units(chosen_by, centre, inverse), bits)
    fitted, nearest = Quantised(codes, scale.float(), offset.float()), round_to_nearest(groups, bits)
    errors = [_error(units, quantised, centre, inverse) for quantised in (fitted, nearest)]
    better = errors[0] < errors[1]
    return Quantised(
        torch.where(better[:, None], fitted.codes, nearest.codes),
        torch.where(better, fitted.scale, nearest.scale),
        torch.where(better, fitted.offset, nearest.offset),
    )


def _best_moments(units: Tensor, bits: int) -> Moments:
    """For each group, the tried codes with the smallest error.

    Tries several shares of the range that codes may span. From the best share it repeats a few times: choose codes, remove the
    large errors, fit the line through the rest.
    """
    codes, errors, scratch = units.new_empty(3, *units.shape)  # allocated once: allocation costs more than the arithmetic
    mean, trials = units.mean(1), []
    for kept in KEPT_RANGES[bits]:
        _clamp(torch.mul(units, (2**bits - 1) / kept, out=codes).sub_(0.5), bits)
        trials.append(_sums(codes, units, scratch))
    line = _best_of(trials, units, mean).least_squares(mean.double())
    for _ in range(STEPS):
        _codes(units, line, bits, out=codes)
        trials.append(_sums(codes, units, scratch))
        torch.sub(units, _values(codes, line, out=errors), out=errors)
        _shrink(errors, line.scale.float() * SHRINK_CODES, scratch)
        left = torch.sub(units, errors, out=errors)
        left_mean = left.mean(1)
        line = _best_of([_sums(codes, left, scratch)], left, left_mean).least_squares(left_mean.double())
    return _best_of(trials, units, mean)


def _shrink(errors: Tensor, threshold: Tensor, scratch: Tensor) -> None:
    """The proximal step of |error|^(1/2), in place: zero below the threshold [groups], the whole error far above it."""
    shares = torch.abs(errors, out=scratch).div_(threshold[:, None].clamp(min=torch.finfo(torch.float32).tiny))
    errors.mul_(shares.rsqrt_().pow_(3).neg_().add_(1.0).clamp_(min=0))


def _sums(codes: Tensor, weights: Tensor, scratch: Tensor) -> Tensor:
    """float32 [3, groups]: sums of codes, of their squares, and of their products with the weights."""
    lengths = torch.linalg.vector_norm(codes, dim=1)
    return torch.stack((codes.sum(1), lengths.square_(), torch.mul(codes, weights, out=scratch).sum(1)))


def _best_of(trials: list[Tensor], weights: Tensor, mean: Tensor) -> Moments:
    """For each group, the moments of the trial that explains most; the first of equal ones."""
    count = weights.shape[1]
    total, squares, products = torch.stack(trials, dim=1).double()  # [trials, groups] each
    mean_code = total / count
    variance = squares - total * mean_code
    moments = Moments(mean_code, torch.where(variance > 0.5 / count, variance, 0.0), products - total * mean)
    best = moments.explained().argmax(dim=0, keepdim=True)
    return Moments(*(part.gather(0, best)[0] for part in moments))


def _codes(weights: Tensor, line: QuantizedLine, bits: int, out: Tensor | None = None) -> Tensor:
    """The centred codes that the line maps nearest to the weights."""
    inverse = torch.where(line.scale > 0, 1 / line.scale, 0.0)
    codes = torch.mul(weights, inverse.float()[:, None], out=out)
    return _clamp(codes.sub_((line.offset * inverse).float()[:, None]), bits)


def _clamp(codes: Tensor, bits: int) -> Tensor:
    return codes.round_().clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _values(codes: Tensor, line: QuantizedLine, out: Tensor | None = None) -> Tensor:
    return torch.mul(codes, line.scale.float()[:, None], out=out).add_(line.offset.float()[:, None])


def _in_units(line: QuantizedLine, centre: Tensor, inverse: Tensor) -> QuantizedLine:
    return QuantizedLine(line.scale * inverse, (line.offset - centre) * inverse)


def _error(units: Tensor, quantised: Quantised, centre: Tensor, inverse: Tensor) -> Tensor:
    """Euclidean length of each group's error, as a share of its range."""
    line = _in_units(QuantizedLine(quantised.scale.double(), quantised.offset.double()), centre, inverse)
    return torch.linalg.vector_norm(_values(quantised.codes, line).sub_(units), dim=1)


def _bfloat16(values: Tensor) -> Tensor:
    """The nearest finite bfloat16 numbers, as float64."""
    return values.clamp(-MOST, MOST).bfloat16().double()
