"""Why a budget is refused: the step as `fit` sees it, what holds its minimum, and what would lower that. Plans, and runs nothing."""
