"""Display names of the planner's operator classes, shared by several pages."""

OPERATOR_WORDS = {
    "compute": "Arithmetic",
    "memory_bandwidth": "Memory traffic",
    "communication": "Communication",
    "overhead": "Overhead per step",
    "memory": "Memory use",
}
