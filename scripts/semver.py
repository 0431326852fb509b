"""Compares rustdoc's JSON of several crates at two commits; scripts/semver.sh says what counts, and runs it.

    semver.py BEFORE NOW CRATE...       two folders with `metadata` of cargo and `<crate>.json` of rustdoc
"""

import json
import os
import sys

# Of the traits that the compiler implements by itself, those whose loss breaks a server.
AUTO = {"Send", "Sync", "Unpin", "UnwindSafe"}


def plain(value):
    """A type or a signature without what may differ although it is the same: numbers of items, names of parameters,
    and paths as they are written."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    out = {}
    for key, each in value.items():
        if key in ("id", "docs", "span", "links"):
            continue
        if key == "inputs" and isinstance(each, list):
            out[key] = [plain(one[1]) if isinstance(one, list) and len(one) == 2 else plain(one) for one in each]
        elif key == "path" and isinstance(each, str):
            out[key] = each.rsplit("::", 1)[-1]
        else:
            out[key] = plain(each)
    return out


def text(value):
    return json.dumps(plain(value), sort_keys=True)


class Interface:
    """The public items of one crate: each path with what must not change about it."""

    def __init__(self, doc):
        self.index = doc["index"]
        self.items = {}
        # Paths at which items of other crates are re-exported, with those items' own paths.
        self.others = {}
        root = self.index[str(doc["root"])]
        self.walk(root, root["name"], set())

    def item(self, number):
        return self.index.get(str(number))

    def walk(self, item, path, above):
        (kind, inner), = item["inner"].items() if isinstance(item["inner"], dict) else ((item["inner"], {}),)
        hidden = any("doc(hidden)" in str(attr) for attr in item["attrs"])
        if hidden or item["id"] in above:
            return
        above = above | {item["id"]}
        if kind == "module":
            self.items[path] = "module"
            for number in inner["items"]:
                self.member(number, path, above)
        elif kind in ("struct", "union", "enum"):
            self.data(item, kind, inner, path, above)
        elif kind == "trait":
            self.trait(inner, path)
        else:
            self.items[path] = kind + text(inner)

    def member(self, number, path, above):
        item = self.item(number)
        if item is None or item["visibility"] not in ("public", "default"):
            return
        if "use" not in item["inner"]:
            self.walk(item, f"{path}::{item['name']}", above)
            return
        use = item["inner"]["use"]
        target = self.item(use["id"])
        if any("doc(hidden)" in str(attr) for attr in item["attrs"]):
            return
        if target is None:
            self.others[f"{path}::{use['name']}"] = use["source"]
            self.items[f"{path}::{use['name']}"] = "re-export"
        elif use["is_glob"]:
            for number in target["inner"].get("module", {}).get("items", []):
                self.member(number, path, above)
        else:
            self.walk(target, f"{path}::{use['name']}", above)

    def data(self, item, kind, inner, path, above):
        grows = any("non_exhaustive" in str(attr) for attr in item["attrs"])
        numbers, closed = inner.get("variants"), True
        if numbers is None:
            shape = inner.get("kind", {"plain": {"fields": inner.get("fields", []), "has_stripped_fields": False}})
            shape = {} if isinstance(shape, str) else shape
            fields = shape.get("plain", {"fields": shape.get("tuple", []), "has_stripped_fields": False})
            numbers = [number for number in fields["fields"] if number is not None]
            closed = not fields["has_stripped_fields"] and None not in fields["fields"]
        members = [self.item(number) for number in numbers]
        members = [member for member in members if member is not None]
        # What may be written out in full elsewhere must not gain a member.
        names = [member["name"] for member in members] if closed and not grows else None
        self.items[path] = text([kind, inner["generics"], grows and closed, names])
        for member in members:
            (_, what), = member["inner"].items()
            if "variant" in member["inner"]:
                what = [what["discriminant"], self.variant(what["kind"])]
            self.items[f"{path}.{member['name']}"] = text(what)
        for number in inner["impls"]:
            self.implementation(self.item(number), path)

    def variant(self, kind):
        numbers = kind if isinstance(kind, str) else kind.get("tuple") or kind.get("struct", {}).get("fields", [])
        if isinstance(numbers, str):
            return numbers
        fields = [self.item(number) for number in numbers if number is not None]
        return [[field["name"], field["inner"]] for field in fields if field is not None]

    def implementation(self, item, path):
        inner = item["inner"]["impl"] if item else None
        if inner is None or inner.get("blanket_impl"):
            return
        if inner["trait"] is not None:
            name = inner["trait"]["path"].rsplit("::", 1)[-1]
            if not inner["is_negative"] and (not inner["is_synthetic"] or name in AUTO):
                self.items[f"{path}: {name}{self.arguments(inner['trait'])}"] = "impl"
            return
        for number in inner["items"]:
            method = self.item(number)
            if method and method["visibility"] == "public":
                (kind, what), = method["inner"].items()
                hidden = any("doc(hidden)" in str(attr) for attr in method["attrs"])
                if not hidden:
                    self.items[f"{path}::{method['name']}"] = kind + text(what)

    def arguments(self, trait):
        args = trait.get("args")
        return "" if not args or not str(args).count("type") else " " + text(args)

    def trait(self, inner, path):
        needed = []
        for number in inner["items"]:
            item = self.item(number)
            if item is None:
                continue
            (kind, what), = item["inner"].items()
            given = what.get("has_body") or what.get("type") or what.get("value") or what.get("default")
            if not given:
                needed.append(item["name"])
            self.items[f"{path}::{item['name']}"] = kind + text({k: v for k, v in what.items() if k != "has_body"})
        self.items[path] = text(["trait", inner["generics"], inner["bounds"], sorted(needed)])


def read(folder, crate):
    path = os.path.join(folder, crate.replace("-", "_") + ".json")
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as file:
        return Interface(json.load(file))


def versions(folder):
    with open(os.path.join(folder, "metadata"), encoding="utf-8") as file:
        return {package["name"]: package["version"] for package in json.load(file)["packages"]}


def may_break(before, now):
    before, now = ([int(part) for part in version.split("-")[0].split(".")] for version in (before, now))
    return now[0] > before[0] or (before[0] == 0 and now[1] > before[1])


def stable(path, facade):
    """Whether the facade re-exports this item of a crate below it outside of `unstable`: the longest path decides."""
    best, verdict = -1, False
    for at, source in facade.others.items():
        source = source.removeprefix("::")
        if (path == source or path.startswith((source + "::", source + ".", source + ":"))) and len(source) >= best:
            kept = not at.startswith("kv_transfer::unstable::")
            verdict = kept or (verdict and len(source) == best)
            best = len(source)
    return verdict


def main():
    before, now, *crates = sys.argv[1:]
    was, is_now = versions(before), versions(now)
    facade = read(now, "kv-transfer")
    # What was stable at either commit counts.
    facades = [each for each in (facade, read(before, "kv-transfer")) if each is not None]
    broken = []
    for crate in crates:
        old, new = read(before, crate), read(now, crate)
        if old is None or new is None:
            print(f"\n{crate}: {'new' if old is None else 'gone'}")
            continue
        added = sorted(new.items.keys() - old.items.keys())
        removed = sorted(old.items.keys() - new.items.keys())
        changed = sorted(path for path in old.items.keys() & new.items.keys() if old.items[path] != new.items[path])

        def counts(path):
            if crate == "kv-transfer":
                return not path.startswith("kv_transfer::unstable")
            if crate == "kv-conformance":
                return False
            return any(stable(path, each) for each in facades)

        print(f"\n{crate} {was[crate]} -> {is_now[crate]}: {len(added)} added, {len(removed)} removed, {len(changed)} changed")
        for mark, paths in (("+", added), ("-", removed), ("!", changed)):
            for path in paths:
                print(f"  {mark}{' ' if counts(path) else '~'}{path}")
        breaking = [path for path in removed + changed if counts(path)]
        if breaking and not may_break(was[crate], is_now[crate]):
            broken.append((crate, len(breaking)))
    print()
    for crate, number in broken:
        print(f"{crate}: {number} stable items removed or changed, and the version is still compatible with {was[crate]}")
    if not broken:
        print("nothing stable was removed or changed without a version that says so")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
