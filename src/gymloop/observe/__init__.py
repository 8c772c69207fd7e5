"""What a run shows: metrics with declared reductions, the files they go to, the terminal, the reward curve."""

from gymloop.observe.metrics import METRICS, Metric, Registry, StepMetrics
from gymloop.observe.sinks import JsonlSink, Sink, TensorBoardSink

__all__ = ["METRICS", "JsonlSink", "Metric", "Registry", "Sink", "StepMetrics", "TensorBoardSink"]
