"""What the cells of the course call: check an answer, use it, check the installation."""

from __future__ import annotations

from pipeschool.grade import unit01, unit02, unit03, unit04, unit05, unit06, unit07
from pipeschool.grade.core import CheckFailed, check, register, seed
from pipeschool.grade.installation import self_check
from pipeschool.grade.learner import reveal, tally, yours

register(unit01.EXERCISES)
register(unit02.EXERCISES)
register(unit03.EXERCISES)
register(unit04.EXERCISES)
register(unit05.EXERCISES)
register(unit06.EXERCISES)
register(unit07.EXERCISES)

__all__ = [
    "CheckFailed",
    "check",
    "reveal",
    "seed",
    "self_check",
    "tally",
    "unit01",
    "unit02",
    "unit03",
    "unit04",
    "unit05",
    "unit06",
    "unit07",
    "yours",
]
