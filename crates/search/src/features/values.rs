//! Configurations of any space as plain number vectors.

use serde_json::Value as Json;

use super::log_scale;

/// Length of [`value_features`]: longer configurations are cut, shorter ones padded with missing numbers.
pub const N_VALUE_FEATURES: usize = 64;

/// Values of a configuration in the order of its parameters, with factors and permutation entries flattened.
/// They are comparable only between spaces of one template.
///
/// # Source
/// AutoTVM, section 6.2: the configuration features with which its program representations are compared.
pub fn value_features(config: &Json) -> Vec<f32> {
    let mut values = Vec::with_capacity(N_VALUE_FEATURES);
    push(config, &mut values);
    values.resize(N_VALUE_FEATURES, f32::NAN);
    values
}

fn push(value: &Json, values: &mut Vec<f32>) {
    match value {
        Json::Object(parameters) => parameters.values().for_each(|value| push(value, values)),
        Json::Array(parts) => parts.iter().for_each(|part| push(part, values)),
        Json::Number(number) => values.push(log_scale(number.as_f64().unwrap_or(f64::NAN))),
        Json::Bool(is) => values.push(f32::from(u8::from(*is))),
        // Categories have no order, so any distinct numbers serve a tree.
        Json::String(text) => {
            let hash = text.bytes().fold(0u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
            values.push((hash % 4096) as f32);
        }
        Json::Null => values.push(f32::NAN),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_flat_and_of_one_length() {
        let config = serde_json::json!({"m": [1, 3], "unroll": true, "order": "ij", "other": "ji"});
        let values = value_features(&config);
        assert_eq!((values.len(), &values[..3]), (N_VALUE_FEATURES, &[1.0, 2.0, 1.0][..]));
        assert!(values[3] != values[4] && values[5..].iter().all(|value| value.is_nan()), "{values:?}");
        let many = serde_json::json!({"m": vec![1; 1000]});
        assert_eq!(value_features(&many).len(), N_VALUE_FEATURES);
    }
}
