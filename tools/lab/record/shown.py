"""How the tables of the record show what they hold."""


def cell(value, form="{:.2f}"):
    return "" if value is None else form.format(value)


def percent(value):
    return cell(value, "{:.1%}")


def code(policy):
    return "`" + policy.replace("|", "\\|") + "`"


def table(head, body):
    print("| " + " | ".join(head) + " |")
    print("|" + "|".join("---" if i == 0 else "--:" for i in range(len(head))) + "|")
    for line in body:
        print("| " + " | ".join(line) + " |")
    print()


def thousands(tokens):
    return f"{tokens // 1024}K" if tokens >= 1024 else str(tokens)


def unique(values):
    return list(dict.fromkeys(values))
