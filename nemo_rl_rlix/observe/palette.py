"""Colours of pipelines and activities.

Hues are blue, orange, green and purple of the Okabe-Ito palette; generating
and training of one pipeline differ in lightness, so that the picture also reads
without colour vision.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl_rlix.observe.busy import Activity


@dataclass(frozen=True)
class Hue:
    """Colours of one pipeline: two on paper, one on a terminal of unknown background."""

    generate: str
    train: str
    terminal: str


HUES = (
    Hue("#7EB9E8", "#0B4F8A", "#4C9BE8"),
    Hue("#F9B466", "#B5430B", "#F28E2B"),
    Hue("#7FD0B0", "#00664B", "#2DB888"),
    Hue("#DBA7CB", "#7A2E70", "#C879B8"),
)
SWITCH = "#3A3A3A"
SWITCH_TERMINAL = "#A0A0A0"
IDLE = "#E6E6E6"


def paper_colour(pipeline_index: int, activity: Activity) -> str:
    """Colour of an activity in a picture on white."""
    if activity is Activity.IDLE:
        return IDLE
    if activity is Activity.SWITCH:
        return SWITCH
    hue = HUES[pipeline_index % len(HUES)]
    return hue.train if activity is Activity.TRAIN else hue.generate


def terminal_colour(pipeline_index: int, activity: Activity) -> str:
    """Colour of an activity on a terminal, where the character tells the activities apart."""
    if activity is Activity.SWITCH:
        return SWITCH_TERMINAL
    return HUES[pipeline_index % len(HUES)].terminal
