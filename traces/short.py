"""Kernel names as people read them: C++ names hold whole type lists; torch-free."""

import re

NAMELESS = "(anonymous namespace)::"
# What says which operation a general kernel was made for, and what only wraps that.
OPERATION = re.compile(
    r"cutlass_\w+|\w*Functor\w*|\w+_functor|\w+Ops|\w+_kernel(?:_cuda|_impl)?\b|\w+_cuda_out"
)
WRAPPER = re.compile(
    r"gpu_(?:index_)?kernel\w*|(?:Binary|AUnary|BUnary)Functor|\w+_internal_kernel"
)
# CuTe DSL's, before the types of its arguments and its constants.
CUTE = re.compile(r"kernel_cutlass_(\w+?_kernel)_")


def short_name(name: str) -> str:
    """`vectorized_elementwise_kernel<MulFunctor>` for the demangled name of that template: no
    return type, no namespaces, no arguments. Other names are as they were."""
    if (made := CUTE.match(name)) is not None:
        return made[1]
    plain = name.replace(NAMELESS, "")
    if re.search(r"[\w>]\(", plain) is None:
        return name
    start = end = opened = depth = 0
    template = ""
    for at, letter in enumerate(plain):
        if letter == "<":
            if depth == 0:
                opened = at
            depth += 1
        elif letter == ">":
            depth -= 1
            if depth == 0:
                template, end = plain[opened:at], opened
        elif depth == 0 and letter == " ":  # a return type stands before it
            start, template, end = at + 1, "", 0
        elif depth == 0 and letter == "(":
            end = end or at
            break
    parts = plain[start:end].split("::")
    base = "::".join(parts[-2:] if parts[-1] == "kernel" else parts[-1:])
    found = (m[0] for m in OPERATION.finditer(template) if not WRAPPER.fullmatch(m[0]))
    operation = next(found, None)
    return f"{base}<{operation}>" if operation else base
