//! Greedy decoding: `generate N ID...` prints the N tokens that follow those that are given.

/// Number of tokens, as the model has it.
const VOCABULARY: usize = 32000;
/// Tokens of a run at most, and the name of their dimension, as the library was made.
const MOST: usize = 128;
const TOKENS: &str = "sequence_length";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let numbers = std::env::args().skip(1).map(|number| number.parse()).collect::<Result<Vec<i64>, _>>()?;
    let (&n_new, prompt) = numbers.split_first().ok_or("generate N ID...")?;
    let mut context = decoder::Context::new(0)?;
    let mut scores = vec![0.0; MOST * VOCABULARY];
    let (mut at, mut token) = (0, 0);
    // As much of the prompt at once as one run takes, then one token after the other.
    while at < prompt.len() + n_new as usize - 1 {
        let ids = if at < prompt.len() { &prompt[at..prompt.len().min(at + MOST)] } else { &[token] };
        let scores = &mut scores[..ids.len() * VOCABULARY];
        context.set_dim(TOKENS, ids.len() as i64)?;
        context.run(ids, scores)?;
        let last = &scores[scores.len() - VOCABULARY..];
        at += ids.len();
        token = (0..VOCABULARY).max_by(|a, b| last[*a].total_cmp(&last[*b])).unwrap_or(0) as i64;
        if at >= prompt.len() {
            println!("{token}");
        }
    }
    Ok(())
}
