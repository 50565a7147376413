"""Autodiff one can watch. This room reads tapes and changes nothing; the engine pays nothing when nobody watches."""

from minigrad.study.check import GradientError, check_grads
from minigrad.study.flow import Flow, watch
from minigrad.study.localize import localize
from minigrad.study.profile import Profile, profile
from minigrad.study.watch import AnomalyError, Tape, detect_anomaly

__all__ = ["AnomalyError", "Flow", "GradientError", "Profile", "Tape", "check_grads", "detect_anomaly", "localize",
           "profile", "watch"]
