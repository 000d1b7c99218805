"""Toys: tasks with a known answer and exact optimum, on which a `Method` is trained in seconds."""
