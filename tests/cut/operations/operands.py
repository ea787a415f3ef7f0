"""What an operation entry by entry has to be given, where not any number will do."""

from __future__ import annotations

INTEGERS = {"Invert", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "LeftShift", "RightShift"}
DIVISIONS = {"Mod", "FloorMod", "FloorDiv", "TruncateDiv", "TruncateMod"}  # integers, too
BOOLS = {"LogicalNot", "LogicalAnd", "LogicalOr"}
POSITIVE = {"Log", "Sqrt", "Rsqrt", "Lgamma", "Digamma", "Acosh", "Pow", "Xlogy", "Xlog1py"}
POSITIVE |= {"Igamma", "Igammac", "Zeta"}
SMALL = {"Erfinv", "Asin", "Acos", "Atanh", "Log1p", "Ndtri"}  # between 0 and 1
COMPLEX = {"Conj", "Real", "Imag", "ComplexAbs", "Angle"}
