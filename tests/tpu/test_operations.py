"""Operations that torch_xla would compute on the host, or otherwise than torch does, give what they give on the CPU."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.tpu.programs import check_same, train
from tests.tpu.test_region import NUM_REPLICAS, enter, traced, values

LINE, IMAGE, VOLUME, ROWS = (2, 3, 7), (2, 3, 7, 6), (1, 2, 5, 4, 3), (6, 5)


def resize(shape, mode, **options):
    return shape, lambda x: F.interpolate(x, mode=mode, **options)


def transformed(x):
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).to(x.device)(x)


def unpooled(x):
    return F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)


def order(x):
    """One of two results, which torch_xla can't look up rows by."""
    return x[:, 0].sort()[1]


def margins(x):
    return F.soft_margin_loss(x, x.detach().sign())


OPERATIONS = {
    "nearest 1d": resize(LINE, "nearest", size=9),
    "nearest 2d": resize(IMAGE, "nearest", scale_factor=2),
    "nearest 3d": resize(VOLUME, "nearest", size=(3, 8, 4)),
    "nearest-exact": resize(IMAGE, "nearest-exact", size=(5, 9)),
    "linear": resize(LINE, "linear", scale_factor=1.5, align_corners=True),
    "bilinear": resize(IMAGE, "bilinear", scale_factor=(1.7, 2)),
    "bilinear antialias": resize(IMAGE, "bilinear", size=(5, 9), antialias=True),
    "bicubic": resize(IMAGE, "bicubic", size=(5, 9), align_corners=True),
    "bicubic antialias": resize(IMAGE, "bicubic", size=(3, 2), antialias=True),
    "trilinear": resize(VOLUME, "trilinear", scale_factor=2),
    "area": resize(IMAGE, "area", size=(5, 4)),
    "adaptive average 1d": (LINE, lambda x: F.adaptive_avg_pool1d(x, 3)),
    "adaptive average 3d": (VOLUME, lambda x: F.adaptive_avg_pool3d(x, (2, 3, 2))),
    "adaptive maximum 1d": (LINE, lambda x: F.adaptive_max_pool1d(x, 3)),
    "adaptive maximum 2d": (IMAGE, lambda x: F.adaptive_max_pool2d(x, (3, 4), return_indices=True)),
    "adaptive maximum 2d, dividing": (IMAGE, lambda x: F.adaptive_max_pool2d(x, (7, 3), return_indices=True)),
    "adaptive maximum 3d": (VOLUME, lambda x: F.adaptive_max_pool3d(x, (2, 3, 2), return_indices=True)),
    "maximum 1d": (LINE, lambda x: F.max_pool1d(x, 2, return_indices=True)),
    "maximum 2d": (IMAGE, lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True)),
    "maximum 3d": (VOLUME, lambda x: F.max_pool3d(x, 2, return_indices=True)),
    "maximum 2d, values": (IMAGE, lambda x: F.max_pool2d(x, 3, 2, 1)),
    "maximum 3d, values": (VOLUME, lambda x: F.max_pool3d(x, 2)),
    "unpooling": (IMAGE, unpooled),
    "einsum": (ROWS, lambda x: torch.einsum("ij,kj->ik", x, x[:4])),
    "einsum, batches": (IMAGE, lambda x: torch.einsum("b...hd,bckd->b...hk", x, x)),
    "einsum, three": (ROWS, lambda x: torch.einsum("ij,j,ik->k", x, x[0], x)),
    "einsum, diagonal": ((4, 4), lambda x: torch.einsum("ii->i", x)),
    "rows by their order": (ROWS, lambda x: x.index_select(0, order(x))),
    "rows to their order": (ROWS, lambda x: torch.zeros_like(x).index_copy(0, order(x), x)),
    "rows added by their order": (ROWS, lambda x: x.index_add(0, order(x), x)),
    "rows filled by their order": (ROWS, lambda x: x.index_fill(0, order(x)[:2], 0.5)),
    "embedding by the greatest": (ROWS, lambda x: F.embedding(x.max(1)[1], x)),
    "product and sum": (ROWS, lambda x: torch.addmm(x, x[:, :1], x[:1], beta=0.5, alpha=2)),
    "product, no sum": (ROWS, lambda x: torch.addmm(x.detach() / 0, x[:, :1], x[:1], beta=0)),
    "cummax": (ROWS, lambda x: (2 * x).round().cummax(1)),
    "cummin": (ROWS, lambda x: (2 * x).round().cummin(0)),
    "cummin of integers": (ROWS, lambda x: (2 * x).int().cummin(-1)),
    "huber": (ROWS, lambda x: F.huber_loss(x, x.detach().flip(0), delta=0.7)),
    "huber, sum": (ROWS, lambda x: F.huber_loss(x, x.detach().flip(0), reduction="sum")),
    "soft margin": (ROWS, margins),
    "norm inf": (ROWS, lambda x: (x.norm(), x.norm(math.inf), x.norm(-math.inf, 1))),
    "glu": (IMAGE, lambda x: F.glu(x, -1)),
    "unfold": (IMAGE, lambda x: F.unfold(x, 2, stride=2, padding=1)),
    "fold": ((2, 12, 12), lambda x: F.fold(x, (4, 5), 2)),
    "channel shuffle": ((2, 4, 3, 3), lambda x: F.channel_shuffle(x, 2)),
    "transformer": ((2, 5, 8), transformed),
}


def with_gradient(function, x):
    """Return an operation's results, and the gradient of their weighted sum."""
    x.requires_grad_()
    results = function(x)
    results = results if isinstance(results, tuple) else (results,)
    trained = [result for result in results if result.requires_grad]
    if not trained:
        return list(results)
    weights = [torch.arange(1.0, result.numel() + 1).reshape(result.shape).sin().to(x.device) for result in trained]
    torch.autograd.backward(trained, weights)
    return [*(result.detach() for result in results), x.grad]


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_and_its_gradient_are_torchs(runtime, name):
    shape, function = OPERATIONS[name]
    rows = torch.randn(NUM_REPLICAS, *shape, generator=torch.Generator().manual_seed(0))
    expected = [torch.stack(column) for column in zip(*(with_gradient(function, row) for row in rows), strict=True)]
    with traced(runtime) as region:
        found = values(region, *with_gradient(function, enter(region, rows)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_infinity_stays_where_it_is(runtime):
    """What an output does not depend on is not multiplied by 0."""
    rows = torch.arange(4.0 * 7).reshape(4, 1, 1, 7)
    rows[..., 6] = math.inf
    with traced(runtime) as region:
        found = values(region, F.adaptive_avg_pool1d(enter(region, rows), 3))
    assert torch.equal(found, torch.stack([F.adaptive_avg_pool1d(row, 3) for row in rows]))


def test_a_running_maximum_keeps_nan(runtime):
    rows = torch.tensor([1.0, 2, math.nan, 3, math.nan, 4]).repeat(4, 1)
    with traced(runtime) as region:
        found = values(region, *enter(region, rows).cummax(0))
    torch.testing.assert_close(found, list(rows.cummax(1)), equal_nan=True)


def spectral_norm():
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))


def cumulative_batch_norms():
    return nn.Sequential(
        nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 5), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 3)
    )


@pytest.mark.parametrize("make_model", [spectral_norm, cumulative_batch_norms])
def test_training_with_buffers_equals_replicas_on_the_cpu(xla_process, make_model):
    check_same(xla_process, train, make_model, [8, 8, 8], num_devices=2)
