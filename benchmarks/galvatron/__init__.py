"""Hetu-Galvatron side by side: its cost rules restated, its recorded answers, our search.

    python -m benchmarks.galvatron CASE.json... [--profiles DIR] [--format text|json]

``cases`` reads a problem and what the peer answered; ``figures`` are a profile's figures as the
rules use them; ``mainrules`` and ``rules24`` are the cost rules of the two engines; ``space`` is
what each may choose; ``pipeline`` is the objective; ``solve`` finds its optimum.
"""
