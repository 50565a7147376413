"""Autodiff one can watch. This room reads tapes and changes nothing; the engine pays nothing when nobody watches."""

from minigrad.study.anomaly import AnomalyError, detect_anomaly
from minigrad.study.check import GradientError, check_grads
from minigrad.study.flow import Flow, watch
from minigrad.study.localize import localize
from minigrad.study.profile import Profile, profile
from minigrad.study.snapshot import Attention, Snapshot
from minigrad.study.tape import Leaf, Pull, Record, Result, Tape

__all__ = ["AnomalyError", "Attention", "Flow", "GradientError", "Leaf", "Profile", "Pull", "Record", "Result",
           "Snapshot", "Tape", "check_grads", "detect_anomaly", "localize", "profile", "watch"]
