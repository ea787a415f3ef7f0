"""Types of operations that compute each entry of the result independently."""

_UNARY = (
    "Neg Exp Log Log1p Expm1 Sqrt Rsqrt Square Tanh Sigmoid Relu Relu6 Elu Selu Softplus Softsign Abs Sign Floor Ceil "
    "Round Rint Reciprocal Inv Erf Erfc Erfinv Lgamma Digamma Sin Cos Tan Asin Acos Atan Sinh Cosh Asinh Acosh Atanh "
    "Cast LogicalNot IsFinite IsNan IsInf ZerosLike OnesLike LeakyRelu Ndtri BesselI0e BesselI1e Invert "
    "Conj Real Imag ComplexAbs Angle"
)
_BINARY = (
    "Add AddV2 Sub Mul RealDiv Div DivNoNan Maximum Minimum Pow SquaredDifference Greater GreaterEqual Less LessEqual "
    "Equal NotEqual LogicalAnd LogicalOr FloorDiv FloorMod Mod TruncateDiv TruncateMod Xdivy Xlogy Xlog1py MulNoNan "
    "Atan2 ReluGrad Relu6Grad TanhGrad SigmoidGrad SqrtGrad RsqrtGrad EluGrad SeluGrad SoftplusGrad SoftsignGrad "
    "LeakyReluGrad InvGrad ReciprocalGrad SelectV2 BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift NextAfter "
    "Igamma Igammac Zeta Polygamma Complex"
)
UNARY = tuple(_UNARY.split())  # the result has the shape of the only operand
BINARY = tuple(_BINARY.split())  # operands are broadcast
