"""Runs any module on several devices: finds a plan, and applies it with DTensors."""

from weft.planner.parallelize.api import parallelize
from weft.planner.parallelize.plan import Plan

__all__ = ["Plan", "parallelize"]
