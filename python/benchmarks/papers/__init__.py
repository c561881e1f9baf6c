"""What the papers' figures ask of a model's attention, a file for each figure: `figure(prompts, ...)` gives its rows and
`draw(rows, file)` its picture. See ../paper_figures.py, the command."""
