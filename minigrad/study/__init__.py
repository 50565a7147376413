"""Autodiff one can watch. This room reads tapes and changes nothing; the engine pays nothing when nobody watches."""

from minigrad.study.watch import AnomalyError, Tape, detect_anomaly

__all__ = ["AnomalyError", "Tape", "detect_anomaly"]
