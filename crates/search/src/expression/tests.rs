use proptest::prelude::*;
use serde_json::json;

use super::*;

fn scope() -> VariableNames {
    let values = ["F", "B"].map(String::from).into();
    [("x", ValueType::Number), ("y", ValueType::Number), ("d", ValueType::Category(values)), ("l", ValueType::List)]
        .map(|(name, kind)| (name.to_owned(), kind))
        .into()
}

fn slots(x: i64, y: i64) -> Vec<Option<Datum>> {
    let list = Datum::List([4, 2, 8].map(Datum::Int).into());
    vec![Some(x.into()), Some(y.into()), Some("B".into()), Some(list)]
}

/// Returns the value of a text for x = 7, y = -2, d = "B", l = [4, 2, 8].
fn value(text: &str) -> Result<Option<Datum>, String> {
    let compiled = Expression::parse(text).and_then(|e| e.compile(&scope()));
    compiled.map(|(code, _)| code.evaluate(&slots(7, -2))).map_err(|e| e.to_string())
}

#[test]
fn expressions_have_the_values_that_python_gives_them() {
    let check = |text: &str, expected: &str| {
        assert_eq!(value(text).map(|found| found.map(|datum| datum.to_string())), Ok(Some(expected.into())), "{text}");
    };
    check("1 + 2 * 3 - 4", "3");
    check("(1 + 2) * 3", "9");
    check("10 - 3 - 2", "5");
    check("x // y", "-4");
    check("x / y", "-3.5");
    check("x % y", "-1");
    check("-x // 2", "-4");
    check("-7.5 // 2", "-4.0");
    check("-7.5 % 2", "0.5");
    check("2 ** 3 ** 2 - -2 ** 2", "516");
    check("2 ** -1", "0.5");
    check("+x - -y", "5");
    check("ceil_div(x, 2) + ceil_div(-x, 2)", "1");
    check("min(x, 3, 9) + max(x, 3)", "10");
    check("min(l) + max([1, x]) + sum(l) + len(l) + abs(y) + len('ab')", "30");
    check("gcd(12, 18) + gcd(0, 5)", "11");
    check("is_power_of_two(64) and not is_power_of_two(0) and not is_power_of_two(y)", "True");
    check("x in {1, 7} and not x in {1, 2} and x not in (3, 4) and x in [7]", "True");
    check("x in range(1, 10**12, 2) and x not in range(0, 10**12, 2) and 3 in range(9, 0, -2)", "True");
    check("d == \"B\" and d != 'F' and d in {'F', 'B'}", "True");
    check("1 if x > 7 else 2 if x == 7 else 3", "2");
    check("0 if y == -2 or 1 / 0 == 1 else 1", "0");
    check("1 < x < 10 == 10 in [10]", "True");
    check("1 < x > 3 != x", "True");
    check("l[0] + l[-1]", "12");
    check("x and y or 5", "-2");
    check("not x == 7 or True", "True");
    check("True + True", "2");
    check("[i * j for i in range(1, 3) for j in l if i * j != 4]", "[2, 8, 8, 16]");
    check("sum(i for i in l if i > 2)", "12");
    check("all([x > 1, y < 0]) and any(i == 8 for i in l)", "True");
    check("1.5 * 2 == 3 and 0.1 + 0.2 != 0.3 and 1e3 == 1_000", "True");
    check("9007199254740993 == 9007199254740992.0", "False");
    check("int(-2.5) + float(3)", "1.0");
    check("'a' in 'cab' and 'a\\'b' == \"a'b\"", "True");
    check("3if x else 4", "3");
}

#[test]
fn lists_have_the_values_that_python_gives_them() {
    let check = |text: &str, expected: serde_json::Value| match list(text) {
        Ok(values) => assert_eq!(values.iter().map(Datum::to_json).collect::<serde_json::Value>(), expected, "{text}"),
        Err(error) => panic!("{text}: {error}"),
    };
    check("[1, 2,4]", json!([1, 2, 4]));
    check(" [ -1, 0.5, 'a b', \"c\", True, False, None, ] ", json!([-1, 0.5, "a b", "c", true, false, null]));
    check("[[1, 2], (3,), ()]", json!([[1, 2], [3], []]));
    check("range(3)", json!([0, 1, 2]));
    check("list(range(1, 9, 3))", json!([1, 4, 7]));
    check("list(range(3, 0, -1))", json!([3, 2, 1]));
    check("[1, 2, 4, 8, 16] + list(range(32, 96+1, 32))", json!([1, 2, 4, 8, 16, 32, 64, 96]));
    check("[16*i for i in range(1,9)]", json!([16, 32, 48, 64, 80, 96, 112, 128]));
    check("[2**i for i in range(0, 4)]", json!([1, 2, 4, 8]));
    check("list(i*j for i in [1, 2] for j in (3, 4) if i*j != 4)", json!([3, 6, 8]));
    check("[i if i % 2 == 0 else -i for i in range(4) if not i == 0 or i > 2]", json!([-1, 2, -3]));
    check(
        "[-2 ** 2, 2 ** -1, 2 ** 3 ** 2, -7 // 2, -7 % 3, 7 / 2, 1_000, 1e-3]",
        json!([-4, 0.5, 512, -4, 2, 3.5, 1000, 0.001]),
    );
    check("[0] * 2 + 2 * ['a']", json!([0, 0, "a", "a"]));
    check("[]", json!([]));
    check("[int(2.5), float(2), 3 in [1, 3], 1 < 2 < 3]", json!([2, 2.0, true, true]));
}

#[test]
fn what_is_no_list_is_refused_with_its_position() {
    let check = |text: &str, expected: &str| match list(text) {
        Ok(values) => panic!("{text}: {values:?}"),
        Err(error) => assert_eq!(error.to_string(), expected, "{text}"),
    };
    check("", "position 1: expected a number, a name or `(`, found the end");
    check("3", "position 1: expected a list, such as [1, 2, 4], found 3");
    check("[1", "position 3: expected `]`, found the end");
    check("[1 2]", "position 4: expected `]`, found 2");
    check("[a]", "position 2: unknown name a; there are none here");
    check("['a\\']", "position 2: the quoted text does not end");
    let parts = "names have no parts: write the value, and `tile` in the place of `p.tile`";
    check("np.arange(3)", &format!("position 3: `.` is not known here; {parts}"));
    assert!(
        list("arange(3)").unwrap_err().to_string().starts_with("position 1: unknown function arange; there are min")
    );
    check("range(10**18)", "position 1: it has no value: more than 1048576 values, those in between included");
    check("[0] * 9999999999", "position 5: it has no value: more than 1048576 values, those in between included");
    check("[10 ** 99]", "position 1: it has no value: the number is too large");
    check("[1 // 0]", "position 1: it has no value: a division by zero");
    check("[x for x in 3]", "position 13: for takes a list, found a number");
    check("[x for x in [1], 2]", "position 16: expected `]`, found `,`");
    assert!(list(&"[".repeat(100_000)).unwrap_err().to_string().contains("more than 20000"));
    assert_eq!(list(&format!("[{}1]", "1, ".repeat(8000))).unwrap().len(), 8001);
}

#[test]
fn what_has_no_value_is_undefined() {
    let zero = ["1 / 0", "x % (y + 2)", "1 / 0 == 1 or x == 7", "ceil_div(1, 0)", "0 ** -1", "1.0 // 0", "x % 0.0"];
    let other = ["9223372036854775807 + x", "10 ** 30", "l[3]", "min([])", "(-8) ** 0.5", "1 in 3 if x < 0 else l[9]"];
    for text in zero.into_iter().chain(other) {
        assert!(matches!(value(text), Ok(None)) || text.contains("in 3"), "{text}: {:?}", value(text));
    }
}

#[test]
fn a_slash_of_specifications_rounds_down() {
    let of = |text: &str| Expression::parse_with(text, Slash::RoundsDown).unwrap();
    assert_eq!(of("7 / 2").value(), Ok(Datum::Int(3)));
    assert_eq!(of("x / 2").to_string(), "x // 2");
}

#[test]
fn errors_say_where_and_what() {
    let check = |text: &str, expected: &str| assert_eq!(value(text).unwrap_err(), expected, "{text}");
    check("x +", "position 4: expected a number, a name or `(`, found the end");
    check("x $ 3", "position 3: unexpected character '$'");
    check("x + (3", "position 7: expected `)`, found the end");
    check("p['x'] < 3", "position 2: `p['x']` is not known here; write `x`");
    let alone = "is not known here; write the condition alone, such as `tile <= 32`";
    check("lambda p: p['x'] <= 32", &format!("position 1: `lambda` {alone}"));
    check("not lambda a, p: a", &format!("position 5: `lambda` {alone}"));
    check("x = 3", "position 3: `=` is not known here; write `==`");
    check("x == 3 && y == 1", "position 8: `&&` is not known here; write `and`");
    check("x == 3 || y == 1", "position 8: `||` is not known here; write `or`");
    check("!x", "position 1: `!` is not known here; write `not`");
    check("x == 1 ? 2 : 3", "position 8: `?` is not known here; write `a if c else b`");
    check("x << 2 <= 3", "position 3: `<<` is not known here; write a product with a power of 2");
    check("x == 1 OR y == 1", "position 8: expected an operator, such as `or`, or the end, found `OR`");
    check("x == z", "position 6: unknown name z; there are x, y, d, l");
    check(
        "x + z()",
        "position 5: unknown function z; there are min, max, abs, len, sum, any, all, range, list, tuple, int, float, ceil_div, gcd, is_power_of_two",
    );
    check("d == \"W\"", "position 6: \"W\" is not one of its values F, B");
    check("d in ['F', \"W\"]", "position 12: \"W\" is not one of its values F, B");
    check("d + 1", "position 1: + takes a number, found a category");
    check("d == 1", "position 6: == takes a category, found a number");
    check("d and x", "position 1: and takes a condition, found a category");
    check("x in 7", "position 6: in takes a list, found a number");
    check("x == 99999999999999999999", "position 6: the number is malformed or too large");
    check("0x10 < x", "position 1: the number is malformed or too large");
    check("ceil_div(x)", "position 1: ceil_div takes 2 arguments, found 1");
    check("d == 'B", "position 6: the quoted text does not end");
    check("{i for i in l}", "position 1: `{… for …}` is not known here; write a list, `[… for …]`");
}

fn expression() -> impl Strategy<Value = Expression> {
    let of = |kind| Expression::new(kind, 0);
    let leaf = prop_oneof![
        (0..i64::MAX).prop_map(|number| ExpressionNode::Constant(Datum::Int(number))),
        (0.0..1e9f64).prop_map(|number| ExpressionNode::Constant(Datum::Float(number))),
        "[a-z '\"\\\\\n]{0,3}".prop_map(|text| ExpressionNode::Constant(text.as_str().into())),
        "[xydl]".prop_map(ExpressionNode::Name),
    ];
    leaf.prop_map(of).prop_recursive(5, 40, 4, move |inner| {
        let operator = proptest::sample::select(OPERATORS);
        (operator, proptest::collection::vec(inner, 4), 0..4).prop_map(move |((operator, _, form), mut operands, n)| {
            if form == OperatorForm::Comparison {
                let first = Box::new(operands.swap_remove(0));
                let rest = operands.into_iter().take(1 + n as usize % 3).map(|operand| (operator, operand));
                return of(ExpressionNode::Compare(first, rest.collect()));
            }
            operands.truncate(match (operator, form) {
                (Op::Choose, _) => 3,
                (Op::Set, _) => 2,
                (Op::List, _) => n as usize,
                (Op::Item | Op::Power, _) | (_, OperatorForm::Infix(_)) => 2,
                (_, OperatorForm::Prefix(_)) => 1,
                (_, OperatorForm::Function(least, most)) => 3.clamp(least, most),
                _ => unreachable!("an operator without a case here"),
            });
            if operator == Op::Sum && n > 0 {
                let clauses = vec![
                    Clause::For("i".into(), operands[0].clone()),
                    Clause::If(of(ExpressionNode::Name("i".into()))),
                ];
                operands = vec![of(ExpressionNode::Each(Box::new(of(ExpressionNode::Name("i".into()))), clauses))];
            }
            of(ExpressionNode::Apply(operator, operands))
        })
    })
}

proptest! {
    #[test]
    fn what_is_printed_parses_back(e in expression()) {
        let text = e.to_string();
        match Expression::parse(&text) {
            Ok(parsed) => prop_assert_eq!(parsed.to_string(), text),
            Err(error) => prop_assert!(matches!(error.reason, Reason::TooLong | Reason::TooDeep), "{} {}", text, error),
        }
    }

    #[test]
    fn folding_keeps_the_value(e in expression(), x in -9i64..9, y in -9i64..9, which in 0usize..16) {
        if let Ok((code, _)) = e.compile(&scope()) {
            let slots = slots(x, y);
            let known: Vec<_> = slots.iter().enumerate().map(|(at, v)| (which >> at & 1 == 1).then(|| v.clone())).collect();
            prop_assert_eq!(code.fold(&known).evaluate(&slots), code.evaluate(&slots));
        }
    }
}
