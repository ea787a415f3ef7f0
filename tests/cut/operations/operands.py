"""Operands for entrywise operations that do not accept every number."""

from __future__ import annotations

INTEGERS = {"Invert", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "LeftShift", "RightShift"}
DIVISIONS = {"Mod", "FloorMod", "FloorDiv", "TruncateDiv", "TruncateMod"}  # also for integers
BOOLS = {"LogicalNot", "LogicalAnd", "LogicalOr"}
POSITIVE = {"Log", "Sqrt", "Rsqrt", "Lgamma", "Digamma", "Acosh", "Pow", "Xlogy", "Xlog1py"}
POSITIVE |= {"Igamma", "Igammac", "Zeta"}
SMALL = {"Erfinv", "Asin", "Acos", "Atanh", "Log1p", "Ndtri"}  # between 0 and 1
COMPLEX = {"Conj", "Real", "Imag", "ComplexAbs", "Angle"}
