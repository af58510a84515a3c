"""Retrieval tasks: the table of them, the text they are hidden in, and examples filled to a length."""

from isentrope.data.tasks.example import Example, ExampleDraft, fill_to_length
from isentrope.data.tasks.fillers import BUILT_IN, SENTENCES, load_filler, load_fillers, load_haystack, parse_fillers
from isentrope.data.tasks.haystack import Haystack
from isentrope.data.tasks.registry import DEPTH_TASKS, GROUPS, TASKS, Task, choose_fillers, draft_example, expand_tasks

__all__ = [
    "BUILT_IN", "DEPTH_TASKS", "GROUPS", "SENTENCES", "TASKS", "Example", "ExampleDraft", "Haystack", "Task",
    "choose_fillers", "draft_example", "expand_tasks", "fill_to_length", "load_filler", "load_fillers", "load_haystack",
    "parse_fillers",
]  # fmt: skip
