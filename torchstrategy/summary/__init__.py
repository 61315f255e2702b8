"""Scalars, histograms, images and texts for TensorBoard, written once for a job."""

from torchstrategy.base import later
from torchstrategy.summary.summaries import histogram, image, scalar, text
from torchstrategy.summary.writer import (
    SummaryWriter,
    create_file_writer,
    create_noop_writer,
    experimental,
    flush,
    record_if,
    should_record_summaries,
)

__all__ = [
    "SummaryWriter",
    "create_file_writer",
    "create_noop_writer",
    "experimental",
    "flush",
    "histogram",
    "image",
    "record_if",
    "scalar",
    "should_record_summaries",
    "text",
]

later.explain_absent(__name__)
