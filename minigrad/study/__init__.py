"""Autodiff one can watch. This room reads tapes and changes nothing; the engine pays nothing when nobody watches."""

from minigrad.study.anomaly import AnomalyError, detect_anomaly
from minigrad.study.snapshot import Attention, Snapshot
from minigrad.study.watch import Leaf, Pull, Record, Result, Tape

__all__ = ["AnomalyError", "Attention", "Leaf", "Pull", "Record", "Result", "Snapshot", "Tape", "detect_anomaly"]
