"""A calculator as an MCP server on standard input and output: exact arithmetic whose work is bounded.

    python examples/calc_x/server.py

The calculators that one finds evaluate `9**9**9` and are gone; here each operation is refused before its result could
become large, so that no expression takes more than a fraction of a millisecond.
"""

from __future__ import annotations

import ast
import warnings
from fractions import Fraction

MAX_CHARACTERS = 200
MAX_BITS = 256
"""Of a numerator or a denominator."""


def calculate(expression: str) -> str:
    """The value of an expression of numbers, parentheses and + - * / // % **.

    Returns:
        "12", "-3.65", or, where the decimals do not end, "2/3 = around 0.666667", as Calc-X writes it; "error: ..." for
        anything else.
    """
    if len(expression) > MAX_CHARACTERS:
        return f"error: more than {MAX_CHARACTERS} characters"
    written = expression.strip().translate({ord("^"): "**", ord("×"): "*", ord("÷"): "/"})
    try:
        return _text(_value(ast.parse(written, mode="eval").body))
    except ZeroDivisionError:
        return "error: division by zero"
    except _Refused as error:
        return f"error: {error}"
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return "error: not an expression"


class _Refused(Exception):
    pass


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            number = Fraction(str(value))  # as it is written: 0.1 is a tenth
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            number = -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            number = _value(operand)
        case ast.BinOp(left=left, op=op, right=right):
            number = _operation(op, _value(left), _value(right))
        case _:
            raise _Refused("only numbers and + - * / // % ** ( )")
    if _bits(number) > MAX_BITS:
        raise _Refused("too large")
    return number


def _operation(op: ast.operator, a: Fraction, b: Fraction) -> Fraction:
    match op:
        case ast.Add():
            return a + b
        case ast.Sub():
            return a - b
        case ast.Mult():
            return a * b
        case ast.Div():
            return a / b
        case ast.FloorDiv():
            return Fraction(a // b)
        case ast.Mod():
            return a % b
        case ast.Pow() if b.denominator == 1:
            if abs(b) * max(_bits(a), 1) > 2 * MAX_BITS:
                raise _Refused("too large")
            return a ** int(b)
        case ast.Pow() if a > 0:
            return Fraction(f"{float(a) ** float(b):.12g}")
        case _:
            raise _Refused("only numbers and + - * / // % ** ( )")


def _bits(number: Fraction) -> int:
    return max(number.numerator.bit_length(), number.denominator.bit_length())


def _text(number: Fraction) -> str:
    if number.denominator == 1:
        return str(number.numerator)
    decimals = f"{float(number):.6f}".rstrip("0")
    return decimals if Fraction(decimals) == number else f"{number} = around {decimals}"


def main() -> None:
    """Serve until the client leaves."""
    from mcp.server import MCPServer

    warnings.simplefilter("ignore", SyntaxWarning)  # of expressions such as "1if"
    server = MCPServer("calculator")

    # A text, and nothing structured next to it: the model reads "12", not {"result": "12"}.
    @server.tool(structured_output=False)
    def calculator(expression: str) -> str:
        """Calculate an expression of numbers, parentheses and + - * / // % **, such as (3 + 4) * 2."""
        return calculate(expression)

    server.run("stdio")


if __name__ == "__main__":
    main()
