(* One set for many rows: no set within every budget has fewer keys than a mixture of the rows allows.
   Used in docs/soundness.md under "One set for many rows". *)

Require Import Arith Certk.sums Certk.best_keys.

Section KeepSet.
Context {key row : Type}.
Variable keys : list key.
Variable rows : list row.
(* The weight of a key in a row, the budget and the multiplier of a row. *)
Variable p : row -> key -> R.
Variables budget y : row -> R.
Hypothesis weights : forall r k, In r rows -> In k keys -> 0 <= p r k.
Hypothesis multipliers : forall r, In r rows -> 0 <= y r.

Definition mixture (k : key) : R := total rows (fun r => y r * p r k).
Definition mixed_budget : R := total rows (fun r => y r * budget r).

Lemma mixture_nonneg k : In k keys -> 0 <= mixture k.
Proof. intros I. apply total_nonneg. intros r J. apply Rmult_le_pos; auto. Qed.

(* A set within budget in every row is within the mixed budget. *)
Lemma within_mixed_budget S :
  (forall r, In r rows -> total keys (part (out S) (p r)) <= budget r) ->
  total keys (part (out S) mixture) <= mixed_budget.
Proof.
  intros B. unfold mixed_budget.
  rewrite (total_ext _ _ (fun k => total rows (fun r => y r * part (out S) (p r) k))).
  - rewrite total_swap. apply total_le. intros r J. rewrite total_times.
    apply Rmult_le_compat_l; auto.
  - intros k _. unfold part, mixture. destruct (out S k); [reflexivity|].
    rewrite (total_ext _ _ (fun _ => 0)) by (intros; ring). now rewrite total_zero.
Qed.

(* Where the best keys of the mixture leave more than the mixed budget, every set within budget has more keys than they are. *)
Theorem fewest_keys best S : best_of keys mixture best ->
  mixed_budget < total keys (part (out best) mixture) ->
  (forall r, In r rows -> total keys (part (out S) (p r)) <= budget r) ->
  (count keys best < count keys S)%nat.
Proof.
  intros O L B. apply Nat.nle_gt. intros C. pose proof (within_mixed_budget S B).
  pose proof (smaller_sets keys mixture mixture_nonneg best S O C). lra.
Qed.
End KeepSet.
