"""What the record's parts took, by the seconds that record.sh leaves beside them."""

from shown import table

LIMIT_S = 420  # on a GPU; so that a part ends within a call that may take no longer


def print_seconds(directory, names):
    took = {name: int(file.read_text()) for name in names if (file := directory / (name + ".seconds")).exists()}
    if not took:
        return
    print("Seconds of the parts\n")
    table(["part", "s"], [[name, str(seconds)] for name, seconds in took.items()] + [["all of these", str(sum(took.values()))]])
    over = [f"`{name}` ({seconds} s)" for name, seconds in took.items() if seconds > LIMIT_S]
    if over:
        print(f"Above {LIMIT_S} s, the most that a part may take with a GPU: " + ", ".join(over) + ".\n")
